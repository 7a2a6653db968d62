"""The operator that runs a whole pipeline in one task, in a context made by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message
from airflow_broadway.core.options import RateLimiting
from airflow_broadway.operators._common import open_run
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue


class Echo(Broadway):
    producer = SqliteProducer(queue="echo", path="/replaced")
    batchers = {"default": Batcher(engine="python")}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        return messages


class Limited(Echo):
    producer = SqliteProducer(
        queue="echo",
        path="/replaced",
        rate_limiting=RateLimiting(allowed_messages=3, interval=3600.0),
    )


def execute(root: Path, run_id: str, pipeline: type[Echo] = Echo) -> tuple[dict[str, Any], Any]:
    """One run; what it returned, and its folder."""
    ti = SimpleNamespace(
        dag_id="d",
        run_id=run_id,
        task_id="run",
        map_index=-1,
        try_number=1,
        get_dr_count=lambda **_: 0,
    )
    dag_run = SimpleNamespace(
        run_id=run_id,
        run_type="manual",
        logical_date=None,
        data_interval_start=None,
        data_interval_end=None,
    )
    context: Any = {"ti": ti, "dag_run": dag_run, "params": {}}
    staging = f"file://{root}/staging"
    operator = BroadwayRunOperator(
        task_id="run",
        pipeline=pipeline(producer={"path": str(root / "queue.db")}),
        staging=staging,
        idle_seconds=0.0,
    )
    return operator.execute(context), open_run(context, staging, pipeline.__name__)


def send(root: Path, count: int) -> None:
    with SqliteQueue(root / "queue.db", "echo") as queue:
        queue.send([b"%d" % number for number in range(count)])


def test_a_run_that_received_is_remembered_for_a_while(tmp_path: Path) -> None:
    send(tmp_path, 5)
    returned, run = execute(tmp_path, "r1")

    assert (returned["received"], returned["acked"]) == (5, 5)
    assert len(run.generations()) == 1
    assert len(run.dag.list("_balanced")) == 1
    assert run.dag.list("_open") == []


def test_empty_runs_leave_nothing_behind(tmp_path: Path) -> None:
    send(tmp_path, 1)
    execute(tmp_path, "r1")

    returned, run = execute(tmp_path, "r2")

    assert returned["received"] == 0
    assert run.generations() == []
    assert run.dag.list("_open") == []
    assert len(run.dag.list("_balanced")) == 1


def test_a_rate_limit_holds_for_all_runs_together(tmp_path: Path) -> None:
    send(tmp_path, 10)
    first, _ = execute(tmp_path, "r1", Limited)
    second, _ = execute(tmp_path, "r2", Limited)
    assert (first["received"], second["received"]) == (3, 0)
