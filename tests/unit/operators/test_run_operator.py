"""The operator that runs a whole pipeline in one task, in a test context."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_broadway import Batcher, BatchInfo, Message, Processors
from airflow_broadway.adapters.host import Host
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.pipeline_options import RateLimiting
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.staging.run_folder import SETTLED, StagedRun
from tests.unit.operators.context import task_context
from tests.unit.passing import Passing


class Echo(Passing):
    producer = SqliteProducer(queue="echo", path="/replaced")
    batchers = {"default": Batcher(engine="python")}


def limited(allowed: int) -> SqliteProducer:
    rate = RateLimiting(allowed_messages=allowed, interval=3600.0)
    return SqliteProducer(queue="echo", path="/replaced", rate_limiting=rate)


class Limited(Echo):
    producer = limited(3)


class Faster(Limited):
    name = "Limited"
    producer = limited(5)


class Failing(Echo):
    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("why") if int(message.data) < 4 else message


class Half(Echo):
    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("why") if message.data == b"0" else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        return [message.failed("why") if message.data == b"1" else message for message in messages]


def execute(
    root: Path, run_id: str, pipeline: type[Echo] = Echo, *, try_number: int = 1, **options: Any
) -> tuple[dict[str, Any], Any]:
    """One run; returns its result and its folder."""
    context = task_context(run_id, task_id="run", running=False)
    context["ti"].try_number = try_number
    operator = BroadwayRunOperator(
        task_id="run",
        pipeline=pipeline(producer={"path": str(root / "queue.db")}),
        staging=f"file://{root}/staging",
        idle_seconds=0.0,
        **options,
    )
    return operator.execute(context), run_of(root, context, pipeline)


def run_of(root: Path, context: Any, pipeline: type[Echo]) -> Any:
    return Host(context).open_run(f"file://{root}/staging", pipeline())


def report_of(run: Any) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run.files.read("report.json"))
    return report


def nonzero(report: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in report["totals"].items() if count}


def send(root: Path, count: int) -> None:
    with SqliteQueue(root / "queue.db", "echo") as queue:
        queue.send([b"%d" % number for number in range(count)])


def test_run_with_messages_is_remembered_until_retention(tmp_path):
    send(tmp_path, 5)
    returned, run = execute(tmp_path, "r1")

    assert (returned["received"], returned["acked"]) == (5, 5)
    assert len(run.generations()) == 1
    assert len(run.dag.list("_balanced")) == 1
    assert run.dag.list("_open") == []


def test_empty_runs_leave_nothing(tmp_path):
    send(tmp_path, 1)
    execute(tmp_path, "r1")

    returned, run = execute(tmp_path, "r2")

    assert returned["received"] == 0
    assert run.generations() == []
    assert run.dag.list("_open") == []
    assert [path for path in Path(run.files.full("")).rglob("*") if path.is_file()] == []
    assert len(run.dag.list("_balanced")) == 1


def test_run_with_another_rate_begins_a_new_window(tmp_path):
    send(tmp_path, 10)
    received = [
        execute(tmp_path, run_id, pipeline)[0]["received"]
        for run_id, pipeline in (("r1", Limited), ("r2", Faster), ("r3", Faster))
    ]
    assert received == [3, 5, 0]


@pytest.mark.parametrize(
    ("count", "fail_when", "why"),
    [
        (4, "all", None),
        (5, "all", None),
        (5, 4, "4 messages failed, of 5 handled"),
        (5, 0.8, None),
        (20, 0.2, "4 messages failed, of 20 handled"),
        (4, "never", None),
    ],
)
def test_failed_messages_fail_the_run_after_settlement(tmp_path, count, fail_when, why):
    send(tmp_path, count)
    if why is None:
        assert execute(tmp_path, "r1", Failing, fail_when=fail_when)[0]["failed"] == 4
    else:
        with pytest.raises(AirflowFailException, match=why):
            execute(tmp_path, "r1", Failing, fail_when=fail_when)
    with SqliteQueue(tmp_path / "queue.db", "echo") as queue:
        depth = queue.depth()
    assert (depth.ready, depth.delayed, depth.leased) == (0, 4, 0)


def test_unbalanced_run_fails_without_retry(tmp_path, monkeypatch):
    # Given a run that loses count of a message
    send(tmp_path, 3)
    monkeypatch.setattr(
        "airflow_broadway.core.custody.in_process.Settler.finish",
        lambda self, **_: SettleReport(acked=2),
    )

    with pytest.raises(AirflowFailException, match="The sum does not balance"):
        execute(tmp_path, "r1", fail_when="never")
    # and its files stay, whatever their age
    assert list(tmp_path.rglob("_balanced/*")) == []
    assert len(list(tmp_path.rglob("generations/*.json"))) == 1


class Breaking(Failing):
    """Interrupts the task at the message 4, while ``broken``."""

    broken = True
    processors = Processors(concurrency=1, max_demand=2)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data == b"4" and Breaking.broken:
            raise KeyboardInterrupt
        return super().handle_message(processor, message, context)


def test_interrupted_run_leaves_its_account(tmp_path):
    send(tmp_path, 6)

    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, "r1", Breaking)

    # Then it is settled, nothing is open, and its report accounts for all messages
    run = run_of(tmp_path, task_context("r1"), Breaking)
    [record] = run.generations()
    assert record.state == SETTLED
    assert run.dag.list("_open") == []
    report = report_of(run)
    failed = {"failed": 4, "requeued": 4}
    assert nonzero(report) == {"received": 6, "released": 2, "accounted": 6, **failed}
    assert (report["balanced"], report["failed_tasks"]) == (True, ["run"])
    assert report["generations"][0]["stopped"] == "interrupted"


def test_lost_receive_response_is_counted_and_released(tmp_path, monkeypatch):
    send(tmp_path, 3)

    def lose_response(queue, *args, **kwargs):
        received(queue, *args, **kwargs)
        raise ProducerError("the answer was lost")

    received = SqliteQueue.receive
    monkeypatch.setattr(SqliteQueue, "receive", lose_response)
    with pytest.raises(ProducerError, match="the answer was lost"):
        execute(tmp_path, "r1")

    report = report_of(run_of(tmp_path, task_context("r1"), Echo))
    assert nonzero(report) == {"received": 3, "released": 3, "accounted": 3}
    assert report["balanced"]


def test_empty_retry_marks_files_of_earlier_tries_for_removal(tmp_path, monkeypatch):
    send(tmp_path, 1)
    execute(tmp_path, "r0")
    with monkeypatch.context() as patch:
        patch.setattr(StagedRun, "forget", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            execute(tmp_path, "r1")

    _, run = execute(tmp_path, "r1", try_number=2)

    assert run.dag.list("_open") == []
    assert any(name.endswith("-r1.json") for name in run.dag.list("_balanced"))


def test_tries_of_a_run_share_one_report(tmp_path, monkeypatch):
    send(tmp_path, 6)
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, "r1", Breaking)

    monkeypatch.setattr(Breaking, "broken", False)
    _, run = execute(tmp_path, "r1", Breaking)

    report = report_of(run)
    assert [generation["received"] for generation in report["generations"]] == [6, 2]
    assert (report["totals"]["acked"], report["totals"]["released"]) == (2, 2)
    assert report["failed_tasks"] == []


def test_report_names_the_reasons_of_failures(tmp_path):
    send(tmp_path, 6)
    _, run = execute(tmp_path, "r1", Failing)
    report = report_of(run)
    assert report["reasons"] == [{"count": 4, "stage": "", "reason": "why"}]
    assert report["totals"]["failed"] == 4


def test_run_sends_its_metrics(tmp_path, monkeypatch):
    sent: dict[str, Any] = {}

    def incr(name, count, tags):
        sent[name] = (count, tags)

    monkeypatch.setattr("airflow_broadway.adapters.metrics.Stats.incr", incr)
    # Given a message that fails before any batch, and one that fails in its batch
    send(tmp_path, 5)
    execute(tmp_path, "r1", Half)

    tags = {"pipeline": "Half", "dag_id": "d"}
    assert sent == {
        "broadway.messages.received": (5, tags),
        "broadway.messages.failed": (2, tags),
        "broadway.messages.acked": (3, tags),
        "broadway.messages.requeued": (2, tags),
        "broadway.batches": (1, {**tags, "batcher": "default", "trigger": "flush"}),
    }
