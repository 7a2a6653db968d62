"""The operator on a standalone cluster: a master and two workers, some of which are killed."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.dataset as ds
import pytest
from airflow.providers.common.compat.sdk import AirflowException

from airflow_broadway.adapters.host import Host
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.runs.spark_batches import SparkBatches
from tests.spark_standalone import MEMORY, Standalone
from tests.unit.spark.pipelines import Counting
from tests.unit.spark.plans import Planned, Staged, rows
from tests.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

BATCHES, ROWS = 4, 20

PIPELINE = """
import os, time
from airflow_broadway import Batcher, Broadway
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.sinks import ParquetFolder

FOLDER = {folder!r}


def slowly(n: int) -> int:
    with open(f"{{FOLDER}}/busy/{{os.getpid()}}", "a") as file:
        file.write(f"{{n}}\\n")
    while not os.path.exists(f"{{FOLDER}}/killed"):
        time.sleep(0.1)
    return n


class Lake(Broadway):
    producer = Producer()
    batchers = {{
        "default": Batcher(
            schema="n bigint", concurrency=2, sink=ParquetFolder(path=f"{{FOLDER}}/lake")
        )
    }}

    def handle_batch(self, batcher, messages, info, context):
        from pyspark.sql import functions as F

        n = F.udf(slowly, "bigint").asNondeterministic()
        return messages.select("message_id", n("data.n").alias("n"))
"""


def busy(folder: Path) -> int:
    """The rows that executors have begun."""
    return sum(len(file.read_text().splitlines()) for file in (folder / "busy").iterdir())


def test_rows_are_written_once_though_an_executor_and_a_worker_are_killed(tmp_path, monkeypatch):
    # Given four batches, whose pipeline is a module that only this process has on its path
    (tmp_path / "code").mkdir()
    (tmp_path / "busy").mkdir()
    (tmp_path / "code" / "lake_pipeline.py").write_text(PIPELINE.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    monkeypatch.setattr(SparkBatches, "leases_kept", lambda *_: nullcontext())
    staging = f"file://{tmp_path}/staging"
    (tmp_path / "staging").mkdir()
    ids = {"dag_id": "d", "run_id": "r", "task_id": "t"}
    ti = SimpleNamespace(**ids, map_index=-1, try_number=1, xcom_push=lambda **_: None)
    dates = dict.fromkeys(("logical_date", "data_interval_start", "data_interval_end"))
    context: Any = {"ti": ti, "dag_run": SimpleNamespace(**dates), "params": {}}
    run = Host(context).open_run(staging, Counting(name="Lake"))
    staged = Staged(tmp_path / "staging" / run.path, pipeline="Lake")
    staged.root_id = run.store.root_id()
    batches = [Planned(f"b{n}", rows(ROWS, prefix=f"b{n}-"), batch_key=n) for n in range(BATCHES)]
    plan = staged.plan("default", batches)
    killed: list[str] = []

    def execute() -> Any:
        operator = BroadwaySparkSubmitOperator(
            task_id="t",
            pipeline="lake_pipeline:Lake",
            batches=[{"plan": plan.path}],
            staging=staging,
            name="d.t",
            executor_memory=MEMORY,
            conf={"spark.sql.shuffle.partitions": 1, "spark.ui.enabled": "false"},
        )
        return operator.execute(context)

    with Standalone(tmp_path / "cluster") as cluster:
        connection = {
            "conn_type": "spark",
            "host": cluster.master,
            "extra": {"deploy-mode": "client"},
        }
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))

        def kill() -> None:
            """Kills an executor, and the other one's worker, once both are at work on a batch."""
            eventually(lambda: len(list((tmp_path / "busy").iterdir())) > 1, 500.0)
            cluster.executor("worker-0").kill()
            cluster.processes["worker-1"].kill()
            (tmp_path / "killed").touch()
            killed.extend(["executor", "worker"])

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()

        # When the task runs, and is retried if it has to be
        try:
            returned = execute()
        except AirflowException:
            returned = execute()
        killer.join(10.0)

    # Then each batch has its outcome, and each row is there once
    assert killed == ["executor", "worker"]
    assert (returned["batches"], returned["failed"]) == (BATCHES, 0)
    ids = ds.dataset(tmp_path / "lake", format="parquet").to_table()["message_id"].to_pylist()
    expected = [row.message_id for batch in batches for row in batch.rows]
    assert Counter(ids) == Counter(expected)
    # and what the killed executor had begun was computed again, by another one
    assert busy(tmp_path) > BATCHES * ROWS
