"""The operator and a real spark-submit, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException

from airflow_broadway.adapters.host import Host
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.runs.spark_batches import SparkBatches
from airflow_broadway.staging.store import Store
from airflow_broadway.submit.environment import find_spark
from airflow_broadway.submit.package import publish, ship
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows

pytestmark = pytest.mark.spark

PIPELINE = """
from airflow_broadway import Batcher, Broadway
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.spark import failed


def double(n: int) -> int:
    return 2 * n


class Doubling(Broadway):
    producer = Producer()
    batchers = {"default": Batcher(schema="n bigint", concurrency=2)}

    def setup(self, run):
        return run.params["lake"]

    def handle_batch(self, batcher, messages, info, lake):
        from pyspark.sql import functions as F

        twice = F.udf(double, "bigint")          # executors import the pipeline's package too
        good = messages.where("data.n > 0").select("message_id", twice("data.n").alias("n"))
        good.write.mode("overwrite").parquet(info.path(lake))
        if info.batch_id == "b1":
            raise ValueError("b1 is broken")
        return failed(messages.where("data.n = 0"), reason="zero")
"""


def test_a_pipeline_runs_on_spark_and_a_second_execution_does_nothing(tmp_path, monkeypatch):
    # Given a pipeline in a package that only this process has on its path, and three batches
    package = tmp_path / "code" / "doubling_shop"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "flights.py").write_text(PIPELINE)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    connection = {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))
    monkeypatch.setattr(SparkBatches, "leases_kept", lambda *_: nullcontext())
    staging = f"file://{tmp_path}/staging"
    (tmp_path / "staging").mkdir()
    run_id = "manual__2026-01-01T00:00:00+00:00"
    ti = SimpleNamespace(dag_id="d", run_id=run_id, task_id="t", map_index=-1, try_number=1)
    dates = dict.fromkeys(("logical_date", "data_interval_start", "data_interval_end"))
    lake = f"file://{tmp_path}/lake"
    context: Any = {"ti": ti, "dag_run": SimpleNamespace(**dates), "params": {"lake": lake}}
    run = Host(context).open_run(staging, Counting(name="Doubling"))
    staged = Staged(tmp_path / "staging" / run.path, pipeline="Doubling")
    staged.root_id = run.store.root_id()
    batches = [Planned(f"b{n}", rows(10, prefix=f"b{n}-"), batch_key=n) for n in range(3)]
    plan = staged.plan("default", batches)
    operator = BroadwaySparkSubmitOperator(
        task_id="t",
        pipeline="doubling_shop.flights:Doubling",
        batches=[{"plan": plan.path}, None],
        staging=staging,
        name="d.t",
    )

    # When it is executed
    returned = operator.execute(context)

    # Then each batch has its outcome, a failed one included, and the lake its rows
    assert returned == {
        "batches": 3,
        "failed": 1,
        "messages": 30,
        "failed_messages": 12,
        "plans": [plan.path],
    }
    outcomes = staged.outcomes("default")
    assert [outcomes[f"b{n}"].successful for n in range(3)] == [9, 0, 9]
    assert "ValueError: b1 is broken" in outcomes["b1"].error
    assert outcomes["b0"].application_id.startswith("local-")
    import pyarrow.dataset as ds

    dataset: list[Any] = ds.dataset(tmp_path / "lake", format="parquet").to_table()["n"].to_pylist()
    assert sorted(dataset) == sorted(2 * n for n in range(1, 10) for _ in range(3))

    # and a second execution starts no JVM
    monkeypatch.setattr(operator, "_submit", None)
    assert operator.execute(context) == returned


def test_a_dead_application_reports_its_end_and_is_retried(tmp_path, monkeypatch):
    # A staging root that the driver does not see: it refuses before it starts a session.
    (tmp_path / "staging").mkdir()
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    connection = {"conn_type": "spark", "host": "local[1]", "extra": {"deploy-mode": "client"}}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))
    monkeypatch.setattr(SparkBatches, "leases_kept", lambda *_: nullcontext())
    staging = f"file://{tmp_path}/staging"
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1)
    dates = dict.fromkeys(("logical_date", "data_interval_start", "data_interval_end"))
    context: Any = {"ti": ti, "dag_run": SimpleNamespace(**dates), "params": {}}
    run = Host(context).open_run(staging, Counting())
    staged = Staged(tmp_path / "staging" / run.path)
    staged.root_id = run.store.root_id()
    plan = staged.plan("default", [Planned("b0", rows(1))])
    operator = BroadwaySparkSubmitOperator(
        task_id="t",
        pipeline="tests.unit.spark.pipelines:Counting",
        batches=[{"plan": plan.path}],
        staging=staging,
        name="d.t",
    )
    monkeypatch.setattr(type(run), "spark_uri", lambda self: f"file://{tmp_path}/not-seen")
    with pytest.raises(AirflowException) as raised:
        operator.execute(context)
    text = str(raised.value)
    assert "1 of 1 batch has no outcome; the others are valid." in text
    assert "every task and the driver must see the same staging root" in text


def test_a_driver_finds_its_code_by_the_uris_that_a_pod_gets(tmp_path):
    # Given code in a run's folder on a shared disk, and a Python that has no such package
    run = Store.open(str(tmp_path / "staging")).folder("Counting/dag/run!3A1")
    (tmp_path / "staging").mkdir()
    shipment = ship("tests.unit.spark.pipelines:Counting", tmp_path / "ship")
    with zipfile.ZipFile(shipment.zip, "a") as file:
        file.writestr("only_in_the_zip.py", "")
    launcher, code = publish(shipment.launcher, run), publish(shipment.zip, run)
    source = Path(launcher.removeprefix("local://"))
    source.write_text(f"import only_in_the_zip\n{source.read_text()}")

    # When spark-submit starts it in client mode, as it does in the pod
    program = find_spark("spark-submit", os.environ)
    command = [program.binary, "--master", "local[1]", "--py-files", code, launcher]
    process = subprocess.run(
        [*command, "--run", run.spark_uri(), "--work", "work/t-000001.json", "--sha256", "0"],
        env={**os.environ, **program.env, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )

    # Then it fails only at its work file, which does not exist
    assert process.returncode == 2, process.stderr
    assert "work/t-000001.json, written on host '?', is not there" in process.stdout


# ------------------------------------------------------------------------- an archive of classes
def run_spark_version(options: str) -> subprocess.CompletedProcess[str]:
    """Starts only Spark's launcher, with options of Java."""
    env = {**os.environ, "SPARK_SUBMIT_OPTS": options}
    command = ["spark-submit", "--version"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_sparks_classes_are_loaded_from_an_archive(tmp_path):
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if "SharedArchiveFile" not in options:
        pytest.skip("this Python was not started by make, which has one made")
    log = tmp_path / "classes"

    process = run_spark_version(f"{options} -Xlog:class+load:file={log}")

    assert process.returncode == 0, process.stderr
    # Classes that are generated from lambdas at run time are in no file.
    files = [
        line
        for line in log.read_text().splitlines()
        if "org.apache.spark." in line and "$Lambda$" not in line
    ]
    mapped = [line for line in files if "source: shared objects file (top)" in line]
    assert len(mapped) > 0.8 * len(files) > 10


def test_an_unsuitable_class_archive_is_ignored(tmp_path):
    archive = tmp_path / "other.jsa"
    archive.write_bytes(b"of another Java")

    process = run_spark_version(f"-XX:SharedArchiveFile={archive}")

    assert process.returncode == 0, process.stderr
