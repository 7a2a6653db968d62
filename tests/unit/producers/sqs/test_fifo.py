"""A FIFO queue through a whole run: groups in order, blocked by failures."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway import Archive, Broadway, Interval, Message, Processors
from airflow_broadway.core.local.run import RunReport
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.staging.archive.reader import look, tables
from airflow_broadway.staging.archive.table import archive_folder
from airflow_broadway.staging.store import Folder
from airflow_broadway.testing import ManualClock
from tests.fake_sqs import FakeSqs, installed
from tests.unit.producers.sqs.kit import FIFO, process_of

#: Six messages of two groups, as one receive returns them.
SENT = ("x1", "y1", "x2", "y2", "x3", "y3")
#: The bodies handled by callbacks, in order.
handled: list[str] = []
failing: set[str] = set()


class Orders(Broadway):
    producer = SqsProducer(
        queue_url=FIFO, conn_id=None, receive_concurrency=1, receive_interval=0.0
    )
    processors = Processors(concurrency=1, max_demand=8, min_demand=6)  # chunks of two

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        body = message.data.decode()
        handled.append(body)
        return message.failed("not yet") if body in failing else message


class Prepared(Orders):
    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        if any(message.data == b"x1" for message in messages):
            raise ValueError("x1 cannot be prepared")
        return messages


@pytest.fixture
def fake():
    handled.clear()
    failing.clear()
    failing.add("x1")
    made = FakeSqs(ManualClock())
    for body in SENT:
        made.put([body], url=FIFO, group=body[0])
    return made


def run(fake: FakeSqs, pipeline: type[Broadway] = Orders, **producer: Any) -> RunReport:
    with installed(fake):
        return pipeline(producer=producer).run_local(clock=fake.clock, max_messages=6)


def test_what_comes_again_holds_back_the_later_ones_of_its_group(fake):
    report = run(fake, on_failure="release")

    assert handled == ["x1", "y1", "y2", "y3"]
    assert (report.settled.acked, report.settled.released) == (3, 3)
    assert report.balanced
    handled.clear()
    failing.clear()
    assert run(fake, on_failure="release").settled.acked == 3
    assert handled == ["x1", "x2", "x3"]


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"on_failure": "noop"}, {"left": 1, "released": 2}),
        ({"on_failure": "retry", "dead_letter": "dead.fifo"}, {"requeued": 1, "released": 2}),
    ],
)
def test_noop_and_retry_block_later_messages_of_group(fake, options, counts):
    report = run(fake, **options)

    assert handled == ["x1", "y1", "y2", "y3"]
    assert {name: getattr(report.settled, name) for name in counts} == counts


@pytest.mark.parametrize("action", ["ack", "dead_letter"])
def test_finished_failure_blocks_nothing(fake, action):
    report = run(fake, on_failure=action, dead_letter="dead.fifo")

    assert handled == ["x1", "y1", "x2", "y2", "x3", "y3"]
    assert report.settled.acked + report.settled.dead_lettered == 6
    assert fake.left(FIFO) == 0


def test_failed_prepare_blocks_its_groups(fake):
    # Chunks of two: x1 and y1 fail together.
    report = run(fake, Prepared, on_failure="release")

    assert handled == []
    assert report.failed == 2
    assert report.settled.released == 6


def test_process_task_releases_blocked_messages(fake, tmp_path):
    pipeline = Orders(producer={"on_failure": "noop"})
    process, _ = process_of(fake, pipeline, tmp_path, Budget(max_messages=6))
    with installed(fake):
        made = process.run()

    assert made["received"] == 6
    assert handled == ["x1", "y1", "y2", "y3"]
    # Released, they wait behind x1, which is invisible until its timeout.
    assert fake.waiting(FIFO) == ["x2", "x3"]
    with installed(fake):
        assert run(fake, on_failure="noop").received == 0
    fake.clock.sleep(900.0)
    failing.clear()
    handled.clear()
    assert run(fake, on_failure="noop").settled.acked == 3
    assert handled == ["x1", "x2", "x3"]


def test_blocked_messages_are_archived_once(fake, tmp_path):
    # Given a run in which x1 fails, so that x2 and x3 wait behind it
    pipeline = Orders(producer={"on_failure": "noop"}, archive=Archive())
    budget = Budget(max_messages=6)
    process, staged = process_of(fake, pipeline, tmp_path, budget, "a" * 32)
    with installed(fake):
        process.run()
    archive = archive_folder(staged.store, staged.pipeline)
    assert payloads(archive) == [b"y1", b"y2", b"y3"]

    # When a later run settles them
    fake.clock.sleep(900.0)
    failing.clear()
    process, _ = process_of(fake, pipeline, tmp_path, budget, "b" * 32)
    with installed(fake):
        assert process.run()["received"] == 3

    # Then every message is archived once
    assert payloads(archive) == [b"x1", b"x2", b"x3", b"y1", b"y2", b"y3"]
    assert look(archive).messages == 6


def payloads(archive: Folder) -> list[bytes]:
    """Returns all archived payloads, with duplicates."""
    ends = (datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC))
    found: list[Any] = []
    for table in tables(archive, look(archive), Interval(*ends)):
        found += table["payload"].to_pylist()
    return sorted(found)
