"""Preparation of a submission; the operator's tests check the command line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_broadway.staging.client import client_options
from airflow_broadway.staging.store import Store
from airflow_broadway.submit.environment import SparkMissing
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
