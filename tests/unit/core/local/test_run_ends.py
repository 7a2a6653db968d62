"""How a run in one process ends: what it holds, what it finishes, and what goes back."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.testing import DummyProducer, ManualClock
from tests.unit.passing import Passing


class Plain(Passing):
    producer = DummyProducer()
    processors = Processors(concurrency=1, max_demand=10)
    batchers = {"default": Batcher(engine="python", batch_size=10, batch_timeout=None)}


def _at_35(message: Message) -> int:
    if message.data == b"35":
        raise ValueError("35")
    return 0


def _split(message: Message, count: int) -> tuple[str, int]:
    _at_35(message)
    return ("emit", 0) if count == 9 else ("cont", count + 1)


class SplitsWrongly(Plain):
    batchers = {"default": Batcher(engine="python", batch_size=(0, _split), max_demand=10)}


@pytest.fixture
def queue(tmp_path):
    queue = SqliteQueue(tmp_path / "queue.db", "q")
    queue.create()
    return queue


def on(queue: SqliteQueue, kind: type[Broadway], **options: Any) -> Broadway:
    return kind(producer=SqliteProducer(queue="q", path=queue.path, **options))


def send(queue: SqliteQueue, count: int) -> None:
    queue.send([b"%d" % number for number in range(count)])


def test_callbacks_see_only_leased_messages(queue):
    # Given callbacks that try to receive, as another run would, whatever they see
    send(queue, 15)
    seen: list[str] = []
    stolen: list[str] = []

    def steals(message):
        other = f"another-{len(seen)}"
        seen.append(message.message_id)
        stolen.extend(
            message.message_id for message in queue.receive(other, 30) if message.message_id in seen
        )
        queue.release(other)
        return message

    class Pipeline(Plain):
        def prepare_messages(self, messages, context):
            return [steals(message) for message in messages]

        def handle_message(self, processor, message, context):
            return steals(message)

    report = on(queue, Pipeline, transformer=steals).run_local()

    # Then no other run could have had one that a callback has seen
    assert (report.received, report.failed, len(seen), stolen) == (15, 0, 45, [])


def test_message_failed_by_the_splitter_fails_alone(queue):
    send(queue, 60)
    seen: list[list[bytes]] = []

    class Pipeline(SplitsWrongly):
        def handle_batch(self, batcher, messages, batch_info, context):
            seen.append([message.data for message in messages])
            return messages

    report = on(queue, Pipeline).run_local()

    # Then its neighbours fill batches as if it were not there, and no callback got it
    assert (report.settled.acked, report.failed) == (59, 1)
    assert [len(batch) for batch in seen] == [10, 10, 10, 10, 10, 9]
    assert b"35" not in [data for batch in seen for data in batch]
    assert [(reason["count"], reason["reason"]) for reason in report.reasons] == [
        (1, "ValueError: 35")
    ]
    depth = queue.depth()
    assert (depth.ready + depth.delayed + depth.dead, depth.leased) == (1, 0)


@pytest.mark.parametrize(
    ("budget", "ended"),
    [({"max_messages": 25}, "max_messages"), ({"max_seconds": 3.0}, "max_seconds")],
)
def test_run_at_its_limit_finishes_its_batches(tmp_path, budget, ended):
    # Given batches that take far longer than a run that is told to stop would have
    clock = ManualClock()
    queue = SqliteQueue(tmp_path / "queue.db", "q", clock=clock)

    class Pipeline(Plain):
        shutdown = 5.0

        def handle_message(self, processor, message, context):
            clock.advance(0.12)
            return message

        def handle_batch(self, batcher, messages, batch_info, context):
            if batch_info.trigger.value == "flush":
                clock.advance(1000.0)
            return messages

    send(queue, 100)

    report = on(queue, Pipeline, lease=1e6).run_local(clock=clock, **budget)

    # Then all that was handled is in a batch, the unfilled one included, and acked
    assert (report.ended, report.settled.acked) == (ended, 25)
    assert report.batches == {"default": {"size": 2, "flush": 1}}
    assert queue.depth().ready == 75


def test_unsettled_group_is_released_at_the_end(queue, monkeypatch, caplog):
    # Given an acknowledger that fails once
    ack = RunAcknowledger.ack
    calls: list[int] = []

    def fails_once(self, *args):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no")
        ack(self, *args)

    monkeypatch.setattr(RunAcknowledger, "ack", fails_once)
    send(queue, 20)

    report = on(queue, Plain).run_local()

    # Then it is logged, the other group is acked, and the failed one can be received at once
    assert [getattr(record, "code", "") for record in caplog.records] == ["acknowledger_error"]
    assert (report.settled.acked, report.settled.released, report.balanced) == (10, 10, True)
    assert {message.attempt for message in queue.receive("next", 20)} == {1}


@pytest.mark.parametrize(("batchers", "acked"), [({}, 4), (Plain.batchers, 0)])
def test_callback_in_own_thread_is_awaited_beyond_shutdown(tmp_path, batchers, acked):
    # Given a processor whose fourth message runs long after the stop
    clock = ManualClock()
    queue = SqliteQueue(tmp_path / "queue.db", "q", clock=clock)
    stop = Stop(clock, shutdown=0.001)

    class Pipeline(Plain):
        def handle_message(self, processor, message, context):
            if message.data == b"3":
                stop.request("test")
                clock.advance(100.0)
            return message

    Pipeline.batchers = batchers
    send(queue, 20)

    report = on(queue, Pipeline, lease=1e6).run_local(clock=clock, stop=stop)

    # Then that message counts as handled, and no other message or batch begins
    assert (report.ended, report.settled.acked, report.balanced) == ("test", acked, True)
    assert (queue.depth().ready, queue.depth().leased) == (20 - acked, 0)
