"""The code that is shipped to Spark drivers works with the standard library alone.

``test_python310.py`` runs these functions again, on Python 3.10 and from the zip file.  So they use
no newer Python and no other package, and take no argument.
"""

from __future__ import annotations

import json
import tempfile
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, failed
from airflow_broadway.core.custody.protocol import Entry, Lease
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import LeaseLapsed, OptionsError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.entries import dump_entry, load_line
from airflow_broadway.core.formats.files import LocalFiles
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.ownership import Ownership, begin_try
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.formats.record_batch import BatchRecorder
from airflow_broadway.core.reference import load_ref, make_ref
from airflow_broadway.core.schema.ddl import parse_schema
from airflow_broadway.core.schema.encoding import dump, load
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.spark.results import Failed, read


class Numbers(Broadway):
    """Fails numbers that end in 1 or 4, and acks those that end in 2 at once."""

    producer = SqliteProducer(queue="numbers")
    processors = Processors(concurrency=3, max_demand=20)
    batchers = {
        "even": Batcher(engine="python", batch_size=7),
        "odd": Batcher(engine="python", batch_size=7, concurrency=2),
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = int(message.data)
        if number % 10 == 1:
            raise ValueError("one")
        if number % 10 == 2:
            message = message.ack_immediately()
        return message.put_batcher("odd" if number % 2 else "even").put_batch_key(number % 3)

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        assert {int(message.data) % 3 for message in messages} == {batch_info.batch_key}
        return [m.failed("four") if int(m.data) % 10 == 4 else m for m in messages]

    def handle_failed(self, messages: Any, context: Any) -> Any:
        return [
            m.configure_ack(on_failure="dead_letter") if m.status.reason == "four" else m
            for m in messages
        ]


def test_drained_queue_balances():
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/queue.db"
        queue = SqliteQueue(path, "numbers")
        queue.send([b"%d" % number for number in range(100)])

        report = Numbers(producer={"path": path}).run_local()

        assert (report.received, report.balanced, report.ended) == (100, True, "empty")
        settled = report.settled
        assert (settled.acked, settled.requeued, settled.dead_lettered) == (80, 10, 10)
        depth = queue.depth()
        assert (depth.ready, depth.delayed, depth.leased, depth.dead) == (0, 10, 0, 10)
        queue.close()


def test_listed_messages_need_no_producer():
    report = Numbers().run_local([b"%d" % number for number in range(100)])
    assert (report.received, report.failed, report.balanced) == (100, 20, True)
    assert sum(report.batches["odd"].values()) >= 40 // 7


def test_pipeline_is_loaded_by_reference_with_options():
    numbers = Numbers(batchers={"odd": {"batch_size": 3}})
    again = load_ref(json.loads(json.dumps(make_ref(numbers))))
    assert again.batchers["odd"].batch_size == 3
    try:
        Numbers(batchers={"odd": {"batch_sise": 3}})
    except OptionsError as error:
        assert "batch_size" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a wrong name was taken")


PLAN = BatchPlan(
    path="batches/odd/inputs/1",
    pipeline="Numbers",
    batcher="odd",
    generations=["g"],
    data=["data-0.parquet"],
    schema="n bigint",
    as_bytes=False,
    messages=5,
    batches=1,
    triggers={"size": 1},
    root_id="root",
    host="host",
)
PLANNED = PlannedBatch(
    batch_id="b0",
    rows=[[0, 0]],
    files=[0],
    batch_key=["a", 1],
    keys=1,
    partition=None,
    size=5,
    bytes=50,
    trigger="size",
    redelivered=0,
    sources={"g": 5},
)


def test_batch_is_recorded_until_a_later_try_begins():
    with tempfile.TemporaryDirectory() as folder:
        # Given a plan, and a lease on its messages
        files = LocalFiles(folder)
        files.write_lines(f"{PLAN.path}/plan.jsonl", [PLAN.dumps(), PLANNED.dumps()])
        deadline = datetime.now(timezone.utc) + timedelta(minutes=1)
        lease = Lease(kind="k", generation="g", seconds=60, deadline=deadline)
        files.replace(paths.lease("g"), json.dumps(lease.to_json()))

        # When a try reads it, and handles a batch
        number, _ = begin_try(files, "t", lambda number: f"{number}")
        plan, batches = BatchPlan.read(files, PLAN.path)
        [planned] = batches
        recorder = BatchRecorder(files, plan, Ownership(files, "t", number), writer="w", fresh=True)
        batch = recorder.begin(planned, ("a", 1))
        assert isinstance(batch.info, BatchInfo)
        entry = Entry("m", "", Verdict(Action.DEAD_LETTER, reason="ü", stage="batch"), payload=b"x")
        exceptions = batch.keep([dump_entry(entry, source=0)])
        batch.record(successful=4, failed=1, missing=0, exceptions=exceptions)

        # Then its outcome names the exception
        path = paths.outcome(plan.path, "b0")
        outcome = Outcome.loads(files.read(path), path)
        assert (outcome.successful, outcome.failed) == (4, 1)
        [line] = entry_lines(files, str(outcome.exceptions))
        assert load_line(line).entry == entry

        # And the first try cannot go on after a later one began
        begin_try(files, "t", lambda number: f"{number}")
        try:
            Ownership(files, "t", number).check(planned.sources)
        except LeaseLapsed as error:
            assert "try 2 of 't' has begun" in str(error)  # noqa: PT017
        else:
            raise AssertionError("the earlier try went on")


def test_values_round_trip():
    value = {"a": [Decimal("1.10"), date(2026, 1, 1), b"\0", (1, {2})], 3: None}
    assert load(dump(value)) == value
    schema = parse_schema("n bigint, t struct<at: timestamp, tags: array<string>>")
    assert [field.name for field in schema.fields] == ["n", "t"]


def test_result_of_handle_batch_is_read_without_spark():
    result = read([failed(["a"], reason="x"), failed(["b"])])
    assert isinstance(result, Failed)
    assert [part.rows for part in result.parts] == [("a",), ("b",)]
    assert read(None) is None


def run_all() -> None:
    """Run all tests of this module, and print their names."""
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name)
