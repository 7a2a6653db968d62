"""One execution of a process task, without Airflow."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from airflow.providers.common.compat.sdk import AirflowTaskTimeout

from airflow_broadway import Batcher, Message, Processors, RateLimiting
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import LeaseLapsed, ProducerError, StagingError
from airflow_broadway.core.model.acks import ack_immediately
from airflow_broadway.core.stages.failure_log import LOGGED_FAILURES
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.process import Process
from airflow_broadway.staging.rate_state import StagedRateState
from airflow_broadway.staging.run_folder import PUBLISHED, SETTLED
from airflow_broadway.staging.store import Folder
from tests.unit.runs.steps import PlainSums, Run, Sums, balanced, precede

COUNT = 40


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, numbers=range(1, COUNT + 1))


def execution(run: Run, **budget: Any) -> Process:
    env = run.env("a" * 32, {"task_id": "process", "map_index": 0, "try_number": 1})
    return Process(run.staged, run.pipeline, env=env, budget=Budget(**budget), ports=run.ports)


def check_released(run: Run) -> None:
    """Checks that nothing is leased or settled, and that no attempt was used."""
    assert run.depth() == (COUNT, 0, 0, 0)
    with run.queue() as queue:
        assert queue.leases() == []
        assert {message.attempt for message in queue.receive("look", COUNT)} == {1}


def test_manifest_counts_what_was_received(run):
    reference = run.process(max_messages=30)

    manifest = run.staged.manifest(reference["generation"])
    assert manifest is not None
    assert (manifest.received, manifest.failed) == (30, 4)
    assert manifest.batchers == {"default": 26}
    assert manifest.stopped == "max_messages"
    assert run.staged.state(reference["generation"]) == PUBLISHED
    assert run.depth() == (10, 0, 30, 0)


def test_generation_is_recorded_before_receiving(run, monkeypatch):
    # Given a look into staging at every receive
    receive = SqliteQueue.receive
    recorded: list[list[str]] = []

    def look(self, generation, *args, **kwargs):
        recorded.append([generation.generation for generation in run.staged.generations()])
        return receive(self, generation, *args, **kwargs)

    monkeypatch.setattr(SqliteQueue, "receive", look)
    execution(run).run()

    assert recorded
    assert all(ids == ["a" * 32] for ids in recorded)


class Limited(Sums):
    """At most 15 messages an hour."""

    producer: Any = SqliteProducer(
        queue="sums",
        path="/replaced",
        rate_limiting=RateLimiting(allowed_messages=15, interval=3600.0),
    )


def test_rate_limit_is_shared_by_producers_and_runs(tmp_path):
    # Given two producers, and a run after theirs
    run, later = Run(tmp_path, pipeline=Limited), Run(tmp_path, "manual__2", pipeline=Limited)
    run.send(range(1, COUNT + 1))

    def received(of, index, **budget):
        owner = {"task_id": "process", "map_index": index, "try_number": 1}
        env = of.env(f"{index}" * 32, owner)
        state = StagedRateState(of.staged)
        process = Process(
            of.staged, of.pipeline, env=env, budget=Budget(**budget), rate_state=state
        )
        return int(process.run()["received"])

    # Then they share one window: what it allows, and not one more
    assert received(run, 0, max_messages=10) == 10
    assert received(run, 1) == 5
    assert received(later, 2) == 0


def test_process_task_settles_an_empty_run(tmp_path):
    run = Run(tmp_path)

    reference = run.process()

    assert (reference["received"], reference["stopped"]) == (0, "empty")
    assert run.staged.state(reference["generation"]) == SETTLED

    # And of an empty run only the report stays, and is returned again
    report = run.ack()
    assert report["balanced"]
    left = [path.name for path in Path(run.staged.files.full("")).rglob("*") if path.is_file()]
    assert left == ["report.json"]
    assert len(run.staged.dag.list("_balanced")) == 1
    assert run.ack() == report
    # A task that is cleared receives as ever
    run.send([1])
    run.batch(run.process(try_number=2))
    assert run.ack()["totals"]["received"] == 1


def _times_out_at_17(message: Message) -> Message:
    if message.data == b"17":
        raise AirflowTaskTimeout("time is over")
    return message


class Transformed(Sums):
    """The task's time is over while messages are transformed."""

    producer: Any = SqliteProducer(queue="sums", path="/replaced", transformer=_times_out_at_17)


def test_timeout_in_transformer_publishes_finished_messages(tmp_path):
    run = Run(tmp_path, pipeline=Transformed, numbers=range(1, COUNT + 1))

    reference = execution(run).run()

    # What is in the dispatch that was being transformed goes back, without using up an attempt
    assert reference["stopped"] == "interrupted"
    assert reference["received"] >= 17
    run.batch(reference)
    report = run.ack()
    assert balanced(report)["released"] >= 1
    assert sum(run.depth()) - run.depth()[3] == COUNT - report["totals"]["acked"] - len(run.dead())


def _fails_at_17(error: type[BaseException]) -> Any:
    def partition(message: Message) -> int:
        if message.data == b"17":
            raise error("no partition")
        return int(message.data)

    return partition


@pytest.mark.parametrize("concurrency", [1, 2])
def test_timeout_in_partition_by_publishes_finished_messages(tmp_path, concurrency):
    class Parted(Sums):
        processors = Processors(
            concurrency=concurrency,
            max_demand=10 // concurrency,
            partition_by=_fails_at_17(AirflowTaskTimeout),
        )

    run = Run(tmp_path, pipeline=Parted, numbers=range(1, COUNT + 1))
    process = execution(run)

    # Then a partition_by that hangs is ended as any callback is, and the rest goes back
    reference = process.run()
    assert process.timed_out
    run.batch(reference)
    report = run.ack()
    totals = balanced(report)
    assert report["generations"][0]["stopped"] == "interrupted"
    done = totals["acked"] + totals["dead_lettered"]
    assert totals["released"] == totals["received"] - done
    assert run.depth() == (COUNT - done, 0, 0, totals["dead_lettered"])
    if concurrency == 1:  # else what the other processors were at is not begun any more
        assert (totals["acked"], totals["dead_lettered"]) == (7, 3)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_message_failed_by_partition_by_fails_alone(tmp_path, concurrency):
    class Parted(Sums):
        processors = Processors(concurrency=concurrency, partition_by=_fails_at_17(ValueError))

    run = Run(tmp_path, pipeline=Parted)
    run.send(range(11, 20))  # of which 14 fails in its processor, and 15 in its batch

    run.all()

    assert run.dead() == [14, 15, 17]
    assert run.depth() == (0, 0, 0, 3)


class PartedBatches(Sums):
    """A batcher's ``partition_by`` fails at 17."""

    batchers = {
        "default": Batcher(
            engine="python",
            batch_size=10,
            batch_timeout=None,
            partition_by=lambda message: _fails_at_17(ValueError)(Message(b"%d" % message.data)),
        )
    }


def test_message_failed_by_batcher_partition_by_fails_alone(tmp_path):
    run = Run(tmp_path, pipeline=PartedBatches, numbers=range(15, 19))

    run.batch(run.process())

    assert balanced(run.ack())
    with run.queue() as queue:
        reasons = {letter.body: letter.reason for letter in queue.dead_letters()}
    assert reasons == {b"15": "five", b"17": "ValueError: no partition"}


class Broken(ValueError):
    """The reason of a failure, with or without a cause."""


class Breaking(Sums):
    """Every message fails, half of them by an error with a cause."""

    raised: ClassVar[list[weakref.ref[Broken]]] = []

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        try:
            int(b"x" + message.data)
        except ValueError as cause:
            error = Broken(str(cause))
            self.raised.append(weakref.ref(error))
            if message.data.endswith(b"1"):
                raise error from cause
            raise error from None
        return message


class BreakingWithTraces(Breaking):
    traces: ClassVar[list[str]] = []

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        self.traces.extend(message.status.stacktrace for message in messages)
        return messages


@pytest.mark.parametrize("pipeline", [Breaking, BreakingWithTraces])
def test_failures_leave_no_reference_cycles(tmp_path, pipeline):
    Breaking.raised.clear()
    BreakingWithTraces.traces.clear()
    run = Run(tmp_path, pipeline=pipeline, numbers=range(1, COUNT + 1))
    gc.collect()
    gc.disable()
    try:
        assert run.process()["failed"] == COUNT
        left = [reference for reference in Breaking.raised if reference() is not None]
    finally:
        gc.enable()
    # Logged ones are kept by the test's log, the last chunk by objects of the run
    assert len(Breaking.raised) == COUNT
    assert len(left) <= LOGGED_FAILURES + pipeline.processors.chunk_size
    if pipeline is BreakingWithTraces:
        assert all("in handle_message" in trace for trace in BreakingWithTraces.traces)
        assert len(BreakingWithTraces.traces) == COUNT


class Stuck(PlainSums):
    """The first message is at work until the run has ended; 2 is settled at once, 3 fails."""

    processors = Processors(concurrency=2, max_demand=1)
    done: threading.Semaphore
    free: threading.Event

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data == b"1":
            self.free.wait(10.0)
            return message
        try:
            if message.data == b"2":
                return message.ack_immediately()
            return message.failed("three") if message.data == b"3" else message
        finally:
            self.done.release()


class StuckBatched(Stuck):
    batchers = {"default": Batcher(engine="python", batch_size=10, batch_timeout=None)}

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


@pytest.mark.parametrize("pipeline", [Stuck, StuckBatched])
def test_stop_counts_messages_done_behind_a_stuck_one(tmp_path, pipeline):
    # Given two processors, the first stuck, and results of the second that wait behind it
    done, free = threading.Semaphore(0), threading.Event()
    pipeline.done, pipeline.free = done, free
    run = Run(tmp_path, pipeline=pipeline, numbers=range(1, 7))
    process = execution(run, max_messages=6)

    def stop():
        for _ in range(5):
            assert done.acquire(timeout=10.0)
        process._stop.request("signal", at_once=True)

    # When it is stopped
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        reference = process.run()
    finally:
        free.set()
        thread.join()

    # Then what is done is published, and the stuck one alone goes back
    assert (reference["received"], reference["failed"]) == (6, 1)
    run.batch(reference)
    totals = balanced(run.ack())

    assert (totals["acked"], totals["dead_lettered"], totals["released"]) == (4, 1, 1)
    assert run.depth() == (1, 0, 0, 1)


class Together(PlainSums):
    """Settles three messages immediately; the broker refuses the second."""

    refused = ""

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        Together.refused = messages[1].message_id
        try:
            ack_immediately(messages[:3])
        except ProducerError:
            if not context["swallows"]:
                raise
        return messages


class TogetherBatched(Together):
    batchers = StuckBatched.batchers


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("pipeline", [Together, TogetherBatched])
def test_partial_immediate_settlement_counts_though_it_raises(
    tmp_path, monkeypatch, pipeline, swallows
):
    run = Run(tmp_path, pipeline=pipeline, context={"swallows": swallows}, numbers=range(1, 5))
    refuse_one(monkeypatch)

    run.batch(run.process())

    # Then two were acked immediately, and no other verdict on them counts
    totals = balanced(run.ack())

    assert (totals["acked"], totals["dead_lettered"]) == ((4, 0) if swallows else (2, 2))
    assert totals["failed"] == (0 if swallows else 4)


def refuse_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the queue refuse to settle the second message immediately."""
    settle_now = SqliteQueue.settle_now

    def refuse(self: SqliteQueue, generation: str, entries: Iterable[Entry]) -> SettleReport:
        by_id = {entry.message_id: entry for entry in entries}
        refused = by_id.pop(Together.refused, None)
        no = SettleReport(failed=1, errors=("no",), undone=frozenset([Together.refused]))
        return settle_now(self, generation, by_id.values()) + (no if refused else SettleReport())

    monkeypatch.setattr(SqliteQueue, "settle_now", refuse)


class TogetherInABatch(Together):
    """The same in ``handle_batch``, where the messages of two executions may meet."""

    batchers = StuckBatched.batchers

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        return messages

    def handle_batch(
        self, batcher: str, messages: list[Message], batch_info: Any, context: Any
    ) -> list[Message]:
        return super().prepare_messages(messages, context)


@pytest.mark.parametrize("swallows", [False, True])
def test_partial_immediate_settlement_counts_in_a_batch(tmp_path, monkeypatch, swallows):
    run = Run(tmp_path, pipeline=TogetherInABatch, context={"swallows": swallows})
    run.send(range(1, 5))
    refuse_one(monkeypatch)

    run.batch(run.process())

    # Then two were acked immediately, their outcome has that, and no other verdict on them is kept
    outcomes = Path(run.staged.files.full("")) / "outcomes"
    [path] = outcomes.rglob("*.json")
    outcome = json.loads(path.read_bytes())
    lines = [json.loads(line) for line in outcome["lines"]]
    at_once = {line["id"] for line in lines if line.get("settled")}
    assert len({line["id"] for line in lines}) == len(lines) == (2 if swallows else 4)
    assert len(at_once) == outcome["settled_now"]["acked"] == 2
    totals = balanced(run.ack())

    assert (totals["acked"], totals["dead_lettered"]) == ((4, 0) if swallows else (2, 2))


def test_immediate_settlement_uses_the_renewed_lease(tmp_path, monkeypatch):
    # Given a lease that would have lapsed while the source waited for its first message
    class Waited(SqliteProducer):
        def source(self, env):
            wrapped: Any = super().source(env)
            wrapped._lease = replace(wrapped._lease, deadline=datetime(2020, 1, 1, tzinfo=UTC))
            return wrapped

        def custodian(self, env):
            wrapped: Any = super().custodian(env)
            settle_now = wrapped.settle_now

            def noted(lease, entries):
                deadlines.append(lease.deadline)
                return settle_now(lease, entries)

            wrapped.settle_now = noted
            return wrapped

    deadlines: list[datetime] = []
    monkeypatch.setattr(Sums, "producer", Waited(queue="sums", path="/replaced"))
    run = Run(tmp_path, context={"now": 3}, numbers=[3])

    run.process()

    # Then it is the lease that the receipt has renewed
    [deadline] = deadlines
    assert deadline > datetime.now(UTC)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_interrupt_ends_the_execution_and_releases(run, monkeypatch, error):
    process = execution(run)
    # Where no callback is at work.
    monkeypatch.setattr(
        "airflow_broadway.staging.writer.ProcessWriter.messages",
        mock.Mock(side_effect=error("enough")),
    )

    with pytest.raises(error):
        process.run()

    check_released(run)
    assert run.staged.state("a" * 32) == SETTLED


def test_swapped_message_fails_alone(run, monkeypatch):
    handle = Sums.handle_message

    def swapping(self, processor, message, context):
        if message.data == b"1":
            return message.replace(message_id="made-up")
        return handle(self, processor, message, context)

    monkeypatch.setattr(Sums, "handle_message", swapping)

    reference = execution(run).run()

    assert (reference["received"], reference["failed"]) == (COUNT, 6)
    run.batch(reference)
    assert balanced(run.ack())
    assert 1 in run.dead()


def test_lapsed_lease_is_not_published(run, monkeypatch):
    # Given a sweep that released the messages while they were handled
    released: list[int] = []

    def sweep(*_):
        with run.queue() as queue:
            released.append(queue.release("a" * 32).released)

    precede(monkeypatch, sweep, Sums, "handle_message", once=True)

    with pytest.raises(LeaseLapsed):
        execution(run).run()

    assert released == [10]  # what the processors can take
    assert run.staged.manifest("a" * 32) is None
    check_released(run)


def test_failed_staging_releases_even_without_a_journal(run, monkeypatch):
    # Given a disk that takes no manifest, and no journal either
    create = Folder.create

    def full(self, path, text):
        if "manifest" in path or "journal" in path:
            raise StagingError("no space is left")
        return create(self, path, text)

    monkeypatch.setattr(Folder, "create", full)
    with pytest.raises(StagingError, match="no space"):
        execution(run).run()
    monkeypatch.undo()

    # Then the messages are released immediately, not when their lease lapses; and the sum is right
    check_released(run)
    assert balanced(run.ack())


@pytest.mark.parametrize("callback", ["handle_failed", "prepare_messages"])
def test_message_replaced_by_a_callback_is_not_acked(tmp_path, callback):
    # Given a callback that makes messages anew, without their ids
    def anew(self, messages, context):
        return [Message(b"7") for _ in messages]

    kind = type("Anew", (Sums,), {callback: anew, "name": "Sums"})
    run = Run(tmp_path, pipeline=kind, numbers=[7])

    run.batch(run.process())
    totals = run.ack()["totals"]

    # Then the broker has the message still, or as a dead letter
    assert totals["acked"] == 0
    assert sum(run.depth()) == 1
