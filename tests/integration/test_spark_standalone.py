"""The operator on a standalone cluster: a master and two workers, some of which are killed."""

from __future__ import annotations

import json
import threading

import pytest
from airflow.providers.common.compat.sdk import AirflowException

from tests.spark_operator import Lake
from tests.spark_standalone import MEMORY, Standalone
from tests.unit.spark.plans import Planned, rows
from tests.waiting import eventually

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

BATCHES, ROWS = 4, 20

HANDLE_BATCH = """
        return messages.select("message_id", n("data.n").alias("n"))
"""


def test_rows_are_written_once_though_an_executor_and_a_worker_are_killed(tmp_path, monkeypatch):
    # Given four batches, whose pipeline is a module that only this process has on its path
    batches = [Planned(f"b{n}", rows(ROWS, prefix=f"b{n}-"), batch_key=n) for n in range(BATCHES)]
    lake = Lake(tmp_path, monkeypatch, HANDLE_BATCH, batches)
    (tmp_path / "wait").touch()
    killed: list[str] = []
    conf = {"spark.sql.shuffle.partitions": 1, "spark.ui.enabled": "false"}

    with Standalone(tmp_path / "cluster") as cluster:
        connection = {
            "conn_type": "spark",
            "host": cluster.master,
            "extra": {"deploy-mode": "client"},
        }
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))

        def kill() -> None:
            """Kills an executor, and the other one's worker, once both process a batch."""
            eventually(lambda: len(list((tmp_path / "busy").iterdir())) > 1, 500.0)
            cluster.executor("worker-0").kill()
            cluster.processes["worker-1"].kill()
            (tmp_path / "wait").unlink()
            killed.extend(["executor", "worker"])

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()

        # When the task runs, and is retried if it has to be
        try:
            returned = lake.execute(executor_memory=MEMORY, conf=conf)
        except AirflowException:
            returned = lake.execute(executor_memory=MEMORY, conf=conf)
        killer.join(10.0)

    # Then each batch has its outcome, and each row exists once
    assert killed == ["executor", "worker"]
    assert (returned["batches"], returned["failed"]) == (BATCHES, 0)
    assert lake.rows() == lake.planned_rows()
    # and the killed executor's rows were recomputed by another one
    assert lake.begun() > BATCHES * ROWS
