"""Preparation of a submission; the operator's tests check the command line."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.spark.connect import VARIABLE, Server
from airflow_broadway.spark.job import CLIENT_VARIABLE
from airflow_broadway.staging.client import client_options
from airflow_broadway.staging.store import Store
from airflow_broadway.submit.environment import SparkMissing
from airflow_broadway.submit.package import ZIP_NAME
from airflow_broadway.submit.submission import Chosen, prepare

REF = {"class": "tests.unit.spark.pipelines:Counting", "options": {}}
CHOSEN = Chosen(master="yarn", deploy_mode="client", binary="spark-submit")


@pytest.mark.parametrize("deploy_mode", ["client", "cluster"])
def test_the_bundled_spark_submit_needs_java(tmp_path, monkeypatch, deploy_mode):
    # Given a worker with the Spark of its Python, and without Java
    for name in ("SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))

    # Then it cannot submit: spark-submit is a program in Java, wherever the driver runs
    chosen = replace(CHOSEN, deploy_mode=deploy_mode)
    run = Store.open(str(tmp_path)).folder("run")
    with pytest.raises(SparkMissing, match=r"JAVA_HOME is .*nothing"):
        prepare(chosen, REF, run, tmp_path, check=False)


def test_code_reaches_pods_through_the_staging_bucket(tmp_path, monkeypatch):
    # Given a bucket at another endpoint than AWS's, and a spark-submit on PATH
    s3_server = pytest.importorskip("tests.s3_server").s3_server
    (tmp_path / "spark-submit").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    chosen = replace(CHOSEN, master="k8s://https://k8s", deploy_mode="cluster")
    with s3_server() as server:
        run = server.store(server.root()).folder("pipeline/dag/run")
        options = client_options(run.store.fs)

        # When an application is prepared, twice
        first, second = (
            prepare(chosen, REF, run, tmp_path, client_options=options, check=False)
            for _ in range(2)
        )

        # Then its code is in the run's folder, by its hash
        assert (first.application, first.py_files) == (second.application, second.py_files)
        for uri in (first.application, first.py_files):
            assert uri.startswith(f"{run.spark_uri()}/code/")
            path = uri.removeprefix(f"{run.spark_uri()}/")
            with run.source(path) as file:
                assert len(file.read()) > 500

        # and Spark finds the bucket, but gets no key
        bucket = f"spark.hadoop.fs.s3a.bucket.{run.spark_uri().split('/')[2]}"
        settings = {n: v for n, v in first.conf.items() if n.startswith("spark.hadoop")}
        assert settings[f"{bucket}.endpoint"] == server.endpoint
        assert settings[f"{bucket}.path.style.access"] == "true"
        assert not [name for name in settings if "key" in name]


@pytest.fixture
def server():
    return replace(CHOSEN, master="sc://spark:15002/;token=hush", conf={"a": True})


def test_client_of_a_server_needs_python_alone(tmp_path, monkeypatch, server):
    # Given a worker without Java and spark-submit
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    (tmp_path / "own").mkdir()
    own = tmp_path / "own" / "helpers.py"
    own.touch()
    run = Store.open(str(tmp_path)).folder("run")

    made = prepare(
        replace(server, py_files=str(own), files={"files": "/data/a.csv"}, env_vars={"B": 1}),
        REF,
        run,
        tmp_path,
        client_options={"key": "k"},
        secrets={"S": "s"},
    )

    # Then Python runs the launcher, with its code and its secrets in the environment alone
    assert (made.program.binary, made.py_files, made.conf) == (sys.executable, "", {})
    zipped = str(tmp_path / ZIP_NAME)
    assert Server.loads(made.variables[VARIABLE]) == Server(
        url=server.master,
        conf={"a": "True"},
        artifacts={"pyfile": [zipped, str(own)], "file": ["/data/a.csv"], "archive": []},
    )
    assert made.variables["PYTHONPATH"].split(os.pathsep)[:2] == [zipped, str(own.parent)]
    assert {"B": "1", "S": "s", CLIENT_VARIABLE: '{"key": "k"}'}.items() <= made.variables.items()


@pytest.mark.parametrize(
    "given", [{"py_files": "s3://a/b.zip"}, {"py_files": "b.whl"}, {"files": {"files": "s3://a/b"}}]
)
def test_files_that_a_server_does_not_get_are_refused(tmp_path, server, given):
    run = Store.open(str(tmp_path)).folder("run")
    with pytest.raises(OptionsError, match=r"expected local files"):
        prepare(replace(server, **given), REF, run, tmp_path)
