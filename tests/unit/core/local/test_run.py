from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_broadway import Batcher, Broadway, Message, Processors, RateLimiting, RetryPolicy
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.stages.processor_pool import ProcessorPool
from airflow_broadway.core.stages.rate_limiter import MemoryRateState, RateLimiter
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.testing import DummyProducer, ManualClock, PipelineDriver
from tests.unit.passing import Passing


class Plain(Passing):
    producer = DummyProducer()
    processors = Processors(concurrency=1)
    batchers = {"default": Batcher(engine="python", batch_size=10)}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "queue.db")


def queue_of(path: str, count: int, clock: Any = None) -> SqliteQueue:
    queue = SqliteQueue(path, "q", **({"clock": clock} if clock else {}))
    queue.create()
    queue.send([b"%d" % number for number in range(count)])
    return queue


def on(path: str, kind: type[Broadway] = Plain, **options: Any) -> Broadway:
    return kind(producer=SqliteProducer(queue="q", path=path, **options))


def test_lease_is_renewed_during_the_run(path):
    class Pipeline(Plain):
        def handle_message(self, processor, message, context):
            time.sleep(0.2)
            return message

    queue_of(path, 10)
    report = on(path, Pipeline, lease=1.5).run_local(max_messages=10)
    assert (report.settled.acked, report.settled.lapsed) == (10, 0)


def test_waiting_longer_than_a_lease_is_no_lapse(path):
    queue_of(path, 0)
    report = on(path, lease=0.05).run_local(wait_seconds=0.3)
    assert (report.received, report.ended) == (0, "empty")


def test_run_waits_only_within_its_limits():
    clock = ManualClock()
    report = Plain().run_local(clock=clock, wait_seconds=30.0, max_seconds=100.0)
    assert report.ended == "empty"
    assert clock.monotonic() == pytest.approx(30.0)
    report = Plain().run_local(clock=clock, wait_seconds=300.0, max_seconds=100.0)
    assert report.ended == "max_seconds"
    assert clock.monotonic() == pytest.approx(130.0)


def test_sigterm_finishes_dispatched_messages_and_releases_the_rest(path):
    class Pipeline(Plain):
        def handle_message(self, processor, message, context):
            if message.data == b"150":
                os.kill(os.getpid(), signal.SIGTERM)
            return message

    queue = queue_of(path, 1000)
    before = signal.getsignal(signal.SIGTERM)
    report = on(path, Pipeline).run_local()
    assert signal.getsignal(signal.SIGTERM) is before
    assert report.ended == "stopped"
    assert report.settled.acked == 160  # dispatched messages were finished
    assert report.balanced
    assert queue.depth().ready == 1000 - 160


def test_unfinished_messages_are_released_after_shutdown_seconds(path):
    clock = ManualClock()
    stop: list[str] = []

    class Pipeline(Plain):
        shutdown = 5.0

        def handle_message(self, processor, message, context):
            clock.advance(1.0)
            if message.data == b"3":
                stop.append("by the test")
            return message

    queue = queue_of(path, 100, clock)
    report = on(path, Pipeline, lease=3600.0).run_local(
        clock=clock, stop=lambda: stop[0] if stop else ""
    )
    assert report.ended == "by the test"
    assert report.settled.released > 0
    assert report.balanced
    assert queue.depth().leased == 0


class Stuck(Plain):
    """The first message is at work until the run has ended, next to nine more, of which 3 fails."""

    processors = Processors(concurrency=2, max_demand=1)
    stuck_in = "process"
    begun: threading.Event
    done: threading.Semaphore
    free: threading.Event

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return self.work(message, "process").put_batch_key(int(message.data))

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [self.work(message, "batch") for message in messages]

    def work(self, message: Message, stage: str) -> Message:
        if stage != self.stuck_in:
            return message
        if message.data == b"0":
            self.begun.set()
            self.free.wait(10.0)
            return message.failed("late")
        self.begun.wait(10.0)  # the thread that got the first message may not have run yet
        self.done.release()
        return message.failed("three") if message.data == b"3" else message


class StuckUnbatched(Stuck):
    batchers = {}


class StuckInABatch(Stuck):
    processors = Processors(concurrency=1)
    batchers = {"default": Batcher(engine="python", batch_size=1, concurrency=2)}
    stuck_in = "batch"


@pytest.mark.parametrize("kind", [Stuck, StuckUnbatched, StuckInABatch])
def test_messages_done_behind_a_stuck_callback_count(path, kind, caplog):
    kind.begun, kind.done, kind.free = threading.Event(), threading.Semaphore(0), threading.Event()
    queue = queue_of(path, 10)
    stop = Stop(SystemClock(), shutdown=0.0)

    def request_stop():
        for _ in range(9):
            assert kind.done.acquire(timeout=10.0)
        stop.request("signal", at_once=True)

    thread = threading.Thread(target=request_stop)
    thread.start()
    try:
        report = on(path, kind).run_local(stop=stop)
    finally:
        kind.free.set()
        thread.join()

    # Then 3 has failed, and what is done is settled, unless a batch was still to handle it
    assert (report.received, report.failed, report.balanced) == (10, 1, True)
    acked = 0 if kind is Stuck else 8
    assert (report.settled.acked, report.settled.requeued) == (acked, 1)
    assert report.settled.released == 9 - acked
    batches = sum(sum(batch.values()) for batch in report.batches.values())
    assert batches == (9 if kind is StuckInABatch else 0)
    [stuck] = [message.message_id for message in queue.receive("next", 10) if message.data == b"0"]
    assert re.search(rf"was still at message '{stuck}' when .* are released", caplog.text)
    assert "three" in caplog.text


def test_message_failed_by_the_transformer_fails_alone(path):
    def transform(message):
        if message.data == b"150":
            raise ValueError("poison")
        return Message(message.data + b"!")  # without id and acknowledger: it gets them again

    queue = queue_of(path, 300)
    report = on(path, transformer=transform).run_local()
    assert (report.received, report.failed, report.balanced) == (300, 1, True)
    assert (report.settled.acked, report.settled.requeued) == (299, 1)
    depth = queue.depth()
    assert (depth.leased, depth.ready + depth.delayed) == (0, 1)


def test_rate_limit_bounds_runs_and_is_remembered(path):
    clock, state = ManualClock(), MemoryRateState()
    queue = queue_of(path, 100, clock)
    limit = RateLimiting(allowed_messages=30, interval=60.0)

    def run(**budget):
        return on(path, rate_limiting=limit).run_local(
            clock=clock, limiter=RateLimiter(limit, clock, state), **budget
        )

    report = run()
    assert (report.received, report.ended) == (30, "rate_limiting")
    assert run().received == 0
    report = run(max_seconds=90.0)  # one window passes while it waits
    assert (report.received, report.ended) == (30, "rate_limiting")
    assert queue.depth().ready == 40


def test_batches_time_out_while_idle(path):
    clock = ManualClock()

    class Pipeline(Plain):
        batchers = {"default": Batcher(engine="python", batch_size=100, batch_timeout=2.0)}

    queue_of(path, 5, clock)
    report = on(path, Pipeline).run_local(clock=clock, idle_seconds=10.0)
    assert report.batches == {"default": {"timeout": 1}}


def test_message_after_a_batch_timeout_is_in_the_next_batch(path):
    clock = ManualClock()
    sizes: list[tuple[int, str]] = []

    class Pipeline(Plain):
        processors = Processors(concurrency=1, max_demand=2)
        batchers = {"default": Batcher(engine="python", batch_size=100, batch_timeout=2.0)}

        def handle_message(self, processor, message, context):
            clock.advance(1.2)  # the second is done 0.4 s after the batch's time
            return message

        def handle_batch(self, batcher, messages, batch_info, context):
            sizes.append((len(messages), batch_info.trigger.value))
            return messages

    queue_of(path, 3, clock)
    on(path, Pipeline, lease=3600.0).run_local(clock=clock)
    assert sizes == [(2, "timeout"), (1, "flush")]


def test_timeout_during_another_batch_is_noticed_immediately():
    seen: list[tuple[str, str]] = []

    class Pipeline(Plain):
        processors = Processors(concurrency=1, max_demand=2)
        batchers = {
            "waiting": Batcher(engine="python", batch_size=10, batch_timeout=2.0),
            "slow": Batcher(engine="python", batch_size=1),
        }

        def handle_message(self, processor, message, context):
            return message.put_batcher(message.data)

        def handle_batch(self, batcher, messages, batch_info, context):
            seen.append((batcher, batch_info.trigger.value))
            driver.clock.advance(3.0 if batcher == "slow" else 0.0)
            return messages

    driver = PipelineDriver(Pipeline)
    driver.push(["waiting", "slow"])
    assert seen == [("slow", "size"), ("waiting", "timeout")]


def test_pending_batches_flush_in_order_of_batchers_and_opening():
    seen: list[tuple[str, str]] = []

    class Pipeline(Plain):
        processors = Processors(concurrency=1, max_demand=100)
        batchers = {
            "second": Batcher(engine="python", batch_size=2),
            "first": Batcher(engine="python", batch_size=2),
        }

        def handle_message(self, processor, message, context):
            batcher, key = message.data
            return message.put_batcher(batcher).put_batch_key(key)

        def handle_batch(self, batcher, messages, batch_info, context):
            if batch_info.trigger == "flush":
                seen.append((batcher, batch_info.batch_key))
            return messages

    data = [("first", "a"), ("second", "c"), ("second", "a"), ("second", "b")]
    driver = PipelineDriver(Pipeline)
    driver.push([*data, ("second", "c"), ("second", "c")])  # c is full, and opened anew
    driver.drain()
    assert seen == [("second", "a"), ("second", "b"), ("second", "c"), ("first", "a")]


def test_batches_of_one_key_stay_in_order_without_partition_by():
    running: Counter[str] = Counter()
    handled: list[tuple[str, int]] = []
    lock = threading.Lock()

    class Pipeline(Plain):
        processors = Processors(concurrency=1, max_demand=100)
        batchers = {"default": Batcher(engine="python", batch_size=5, concurrency=4)}

        def handle_message(self, processor, message, context):
            return message.put_batch_key("abc"[message.data % 3])

        def handle_batch(self, batcher, messages, batch_info, context):
            key = batch_info.batch_key
            with lock:
                running[key] += 1
                assert running[key] == 1
            time.sleep(0.001)
            with lock:
                running[key] -= 1
                handled.extend((key, m.data) for m in messages)
            return messages

    assert Pipeline().run_local(range(300)).failed == 0
    for index, key in enumerate("abc"):
        assert [data for other, data in handled if other == key] == [*range(index, 300, 3)]


def test_ten_messages_are_spread_over_ten_processors():
    barrier = threading.Barrier(10, timeout=5.0)

    class Pipeline(Plain):
        processors = Processors(concurrency=10)
        batchers: Any = {}

        def handle_message(self, processor, message, context):
            barrier.wait()
            return message

    assert Pipeline().run_local(range(10)).failed == 0


def test_receiving_stays_close_to_processing():
    class Pipeline(Plain):
        processors = Processors(concurrency=2, max_demand=10)

    pool = ProcessorPool(Pipeline())
    taken = handled = ahead = 0

    def dispatches():
        nonlocal taken, ahead
        for _ in range(500):
            taken += 10
            ahead = max(ahead, taken - handled)
            yield [Message(n) for n in range(10)]

    for chunk, _ in pool.map(dispatches()):
        handled += len(chunk)
    pool.close()
    assert handled == 5000
    assert ahead <= 200


# -- properties ------------------------------------------------------------------------------------

fates = st.sampled_from(["ok", "ok", "ok", "fail", "raise", "now", "batch-fail", "lost", "late"])
streams = st.lists(st.tuples(fates, st.sampled_from("ab")), max_size=40)


class Fated(Plain):
    """Each message carries its fate and its key."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        fate, key = message.data.decode().split()
        message = message.put_batch_key(key)
        match fate:
            case "fail":
                return message.failed("failed")
            case "raise":
                raise ValueError("raised")
            case "now":
                return message.ack_immediately()
            case "late":
                message.ack_immediately()
                raise ValueError("after")
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        assert len(messages) == batch_info.size <= 10
        return [
            m.failed("in batch") if m.data.startswith(b"batch-fail") else m
            for m in messages
            if not m.data.startswith(b"lost")
        ]


def verdicts(stream: list[tuple[str, str]], folder: Path, budget: int) -> dict[int, str]:
    """The fate of each message, by its number, as read from the queue after the runs."""
    path = str(folder / "queue.db")
    clock = ManualClock()
    with SqliteQueue(path, "q", clock=clock) as queue:
        ids = queue.send([f"{fate} {key}".encode() for fate, key in stream])
        received = 0
        while received < len(stream):
            report = on(path, Fated, retry=RetryPolicy(max_attempts=2, jitter=0.0)).run_local(
                max_messages=min(budget, len(stream) - received), clock=clock
            )
            assert report.balanced
            received += report.received
        assert (queue.depth().leased, queue.depth().ready) == (0, 0)
        clock.advance(3600.0)
        again = {message.message_id: message.attempt for message in queue.receive("look", 1000)}
        assert not queue.dead_letters()
    return {
        number: f"attempt {again[message_id]}" if message_id in again else "acknowledged"
        for number, message_id in enumerate(ids)
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stream=streams.filter(lambda s: "lost" not in dict(s)), cut=st.integers(1, 40))
def test_splitting_a_run_changes_no_verdict(stream, cut, tmp_path_factory):
    whole = verdicts(stream, tmp_path_factory.mktemp("whole"), 1000)
    assert verdicts(stream, tmp_path_factory.mktemp("parts"), cut) == whole
    fails = {"fail", "raise", "batch-fail"}
    assert whole == {
        number: "attempt 2" if fate in fails else "acknowledged"
        for number, (fate, _) in enumerate(stream)
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(stream=streams)
def test_every_message_is_in_exactly_one_class(stream, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("run") / "queue.db")
    with SqliteQueue(path, "q") as queue:
        queue.create()
        queue.send([f"{fate} {key}".encode() for fate, key in stream])
        report = on(path, Fated).run_local()
        expected = Counter(fate for fate, _ in stream)
        assert report.balanced
        assert report.settled.released == expected["lost"]
        assert report.settled.requeued == (
            expected["fail"] + expected["raise"] + expected["batch-fail"]
        )
        assert report.settled.acked == expected["ok"] + expected["now"] + expected["late"]
        depth = queue.depth()
        assert (depth.leased, depth.ready) == (0, expected["lost"])
