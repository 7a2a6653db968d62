"""One execution of a process task, without Airflow."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from airflow.providers.common.compat.sdk import AirflowTaskTimeout

from airflow_broadway import Batcher, Message, Processors, RateLimiting
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import LeaseLapsed, ProducerError, StagingError
from airflow_broadway.core.model.acks import ack_immediately
from airflow_broadway.core.stages.failure_log import LOGGED_FAILURES
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.process import Process
from airflow_broadway.staging.rate_state import StagedRateState
from airflow_broadway.staging.run_folder import PUBLISHED, SETTLED
from tests.unit.runs.steps import PlainSums, Run, Sums, precede

COUNT = 40


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    made.send(range(1, COUNT + 1))
    return made


def execution(run: Run, **budget: Any) -> Process:
    owner = {"task_id": "process", "map_index": 0, "try_number": 1}
    return Process(
        run.staged,
        run.pipeline,
        env=run.env("a" * 32, owner),
        budget=Budget(**budget),
        ports=run.ports,
    )


def check_given_back(run: Run) -> None:
    """Nothing is held, nothing was settled, and no attempt was used."""
    assert run.depth() == (COUNT, 0, 0, 0)
    with run.queue() as queue:
        assert queue.leases() == []
        assert {each.attempt for each in queue.receive("look", COUNT)} == {1}


def test_what_is_published_names_what_was_received(run: Run) -> None:
    reference = run.process(max_messages=30)

    manifest = run.staged.manifest(reference["generation"])
    assert manifest is not None
    assert (manifest.received, manifest.failed) == (30, 4)
    assert manifest.batchers == {"default": 26}
    assert manifest.stopped == "max_messages"
    assert run.staged.state(reference["generation"]) == PUBLISHED
    assert run.depth() == (10, 0, 30, 0)


def test_an_execution_is_on_record_before_it_receives(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given somebody who looks into staging at each receive
    receive = SqliteQueue.receive
    recorded: list[list[str]] = []

    def looks(self: SqliteQueue, generation: str, *given: Any, **named: Any) -> list[Message]:
        recorded.append([each.generation for each in run.staged.generations()])
        return receive(self, generation, *given, **named)

    monkeypatch.setattr(SqliteQueue, "receive", looks)
    execution(run).run()

    assert recorded
    assert all(found == ["a" * 32] for found in recorded)


class Limited(Sums):
    """At most 15 messages an hour."""

    producer: Any = SqliteProducer(
        queue="sums",
        path="/replaced",
        rate_limiting=RateLimiting(allowed_messages=15, interval=3600.0),
    )


def test_a_rate_limit_is_that_of_all_producers_and_runs_together(tmp_path: Path) -> None:
    # Given two producers, and a run after theirs
    run, later = Run(tmp_path, pipeline=Limited), Run(tmp_path, "manual__2", pipeline=Limited)
    run.send(range(1, COUNT + 1))

    def received(of: Run, index: int, **budget: Any) -> int:
        owner = {"task_id": "process", "map_index": index, "try_number": 1}
        env = of.env(f"{index}" * 32, owner)
        state = StagedRateState(of.staged)
        made = Process(of.staged, of.pipeline, env=env, budget=Budget(**budget), rate_state=state)
        return int(made.run()["received"])

    # Then they share one window: what it allows, and not one more
    assert received(run, 0, max_messages=10) == 10
    assert received(run, 1) == 5
    assert received(later, 2) == 0


def test_an_empty_run_is_settled_by_its_process_task(tmp_path: Path) -> None:
    run = Run(tmp_path)

    reference = run.process()

    assert (reference["received"], reference["stopped"]) == (0, "empty")
    assert run.staged.state(reference["generation"]) == SETTLED

    # And of an empty run the report alone stays, and is told again
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


def test_a_time_out_while_messages_are_transformed_publishes_what_is_done(tmp_path: Path) -> None:
    run = Run(tmp_path, pipeline=Transformed)
    run.send(range(1, COUNT + 1))

    reference = execution(run).run()

    # What is in the dispatch that was being transformed goes back, without using up an attempt
    assert reference["stopped"] == "interrupted"
    assert reference["received"] >= 17
    run.batch(reference)
    report = run.ack()
    assert report["balanced"]
    assert report["totals"]["released"] >= 1
    assert sum(run.depth()) - run.depth()[3] == COUNT - report["totals"]["acked"] - len(run.dead())


def _fails_at_17(error: type[BaseException]) -> Any:
    def partition(message: Message) -> int:
        if message.data == b"17":
            raise error("no partition")
        return int(message.data)

    return partition


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_time_out_while_messages_are_parted_publishes_what_is_done(
    tmp_path: Path, concurrency: int
) -> None:
    class Parted(Sums):
        processors = Processors(
            concurrency=concurrency,
            max_demand=10 // concurrency,
            partition_by=_fails_at_17(AirflowTaskTimeout),
        )

    run = Run(tmp_path, pipeline=Parted)
    run.send(range(1, COUNT + 1))
    made = execution(run)

    # Then a partition_by that hangs is ended as any callback is, and the rest goes back
    reference = made.run()
    assert made.timed_out
    run.batch(reference)
    report = run.ack()
    totals = report["totals"]
    assert report["balanced"]
    assert report["generations"][0]["stopped"] == "interrupted"
    done = totals["acked"] + totals["dead_lettered"]
    assert totals["released"] == totals["received"] - done
    assert run.depth() == (COUNT - done, 0, 0, totals["dead_lettered"])
    if concurrency == 1:  # else what the other processors were at is not begun any more
        assert (totals["acked"], totals["dead_lettered"]) == (7, 3)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_message_on_which_partition_by_raises_fails_alone(
    tmp_path: Path, concurrency: int
) -> None:
    class Parted(Sums):
        processors = Processors(concurrency=concurrency, partition_by=_fails_at_17(ValueError))

    run = Run(tmp_path, pipeline=Parted)
    run.send(range(11, 20))  # of which 14 fails in its processor, and 15 in its batch

    run.batch(run.process())
    run.ack()

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


def test_a_batchers_partition_by_that_raises_fails_that_message(tmp_path: Path) -> None:
    run = Run(tmp_path, pipeline=PartedBatches)
    run.send(range(15, 19))

    run.batch(run.process())

    assert run.ack()["balanced"]
    with run.queue() as queue:
        reasons = {letter.body: letter.reason for letter in queue.dead_letters()}
    assert reasons == {b"15": "five", b"17": "ValueError: no partition"}


class Broken(ValueError):
    """Why a message failed; some of them have a cause."""


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


class BreakingAndAsked(Breaking):
    traces: ClassVar[list[str]] = []

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        self.traces.extend(each.status.stacktrace for each in messages)
        return messages


@pytest.mark.parametrize("pipeline", [Breaking, BreakingAndAsked])
def test_failures_leave_no_rings_for_the_garbage_collector(
    tmp_path: Path, pipeline: type[Breaking]
) -> None:
    Breaking.raised.clear()
    BreakingAndAsked.traces.clear()
    run = Run(tmp_path, pipeline=pipeline)
    run.send(range(1, COUNT + 1))
    gc.collect()
    gc.disable()
    try:
        assert run.process()["failed"] == COUNT
        left = [each for each in Breaking.raised if each() is not None]
    finally:
        gc.enable()
    # Those that were told are kept by a test's log, and the last chunk by the run's own objects
    assert len(Breaking.raised) == COUNT
    assert len(left) <= LOGGED_FAILURES + pipeline.processors.chunk_size
    if pipeline is BreakingAndAsked:
        assert all("in handle_message" in trace for trace in BreakingAndAsked.traces)
        assert len(BreakingAndAsked.traces) == COUNT


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
def test_a_stop_counts_what_is_done_behind_a_message_that_is_stuck(
    tmp_path: Path, pipeline: type[Stuck]
) -> None:
    # Given two processors, the first stuck, and results of the second that wait behind it
    done, free = threading.Semaphore(0), threading.Event()
    pipeline.done, pipeline.free = done, free
    run = Run(tmp_path, pipeline=pipeline)
    run.send(range(1, 7))
    made = execution(run, max_messages=6)

    def stops() -> None:
        for _ in range(5):
            assert done.acquire(timeout=10.0)
        made._stop.request("signal", at_once=True)

    # When it is stopped
    told = threading.Thread(target=stops)
    told.start()
    try:
        reference = made.run()
    finally:
        free.set()
        told.join()

    # Then what is done is published, and the stuck one alone goes back
    assert (reference["received"], reference["failed"]) == (6, 1)
    run.batch(reference)
    report = run.ack()
    totals = report["totals"]
    assert report["balanced"]
    assert (totals["acked"], totals["dead_lettered"], totals["released"]) == (4, 1, 1)
    assert run.depth() == (1, 0, 0, 1)


class Together(PlainSums):
    """Settles three messages at once, of which the broker refuses the second."""

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
def test_what_is_done_of_a_settlement_at_once_counts_though_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: type[Together], swallows: bool
) -> None:
    run = Run(tmp_path, pipeline=pipeline, context={"swallows": swallows})
    run.send(range(1, 5))
    refuses_one(monkeypatch)

    run.batch(run.process())

    # Then two were acked at once, and no other verdict on them counts
    report = run.ack()
    totals = report["totals"]
    assert report["balanced"]
    assert (totals["acked"], totals["dead_lettered"]) == ((4, 0) if swallows else (2, 2))
    assert totals["failed"] == (0 if swallows else 4)


def refuses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the queue refuse to settle the second message at once."""
    settle_now = SqliteQueue.settle_now

    def refuses(self: SqliteQueue, generation: str, entries: Any) -> SettleReport:
        given = list(entries)
        taken = [entry for entry in given if entry.message_id != Together.refused]
        refused = frozenset(entry.message_id for entry in given) & {Together.refused}
        no = SettleReport(failed=1, errors=("no",), undone=refused) if refused else SettleReport()
        return settle_now(self, generation, taken) + no

    monkeypatch.setattr(SqliteQueue, "settle_now", refuses)


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
def test_what_is_done_of_a_settlement_at_once_counts_in_a_batch_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swallows: bool
) -> None:
    run = Run(tmp_path, pipeline=TogetherInABatch, context={"swallows": swallows})
    run.send(range(1, 5))
    refuses_one(monkeypatch)

    run.batch(run.process())

    # Then two were acked at once, their outcome says so, and no other verdict on them is kept
    outcomes = Path(run.staged.files.full("")) / "outcomes"
    [path] = outcomes.rglob("*.json")
    outcome = json.loads(path.read_bytes())
    lines = [json.loads(line) for line in outcome["lines"]]
    at_once = {line["id"] for line in lines if line.get("settled")}
    assert len({line["id"] for line in lines}) == len(lines) == (2 if swallows else 4)
    assert len(at_once) == outcome["settled_now"]["acked"] == 2
    report = run.ack()
    totals = report["totals"]
    assert report["balanced"]
    assert (totals["acked"], totals["dead_lettered"]) == ((4, 0) if swallows else (2, 2))


def test_what_is_settled_at_once_is_so_under_the_lease_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a lease that would have lapsed while the first message was waited for
    class Waited(SqliteProducer):
        def source(self, env: ProducerEnv) -> Any:
            made: Any = super().source(env)
            made._lease = replace(made._lease, deadline=datetime(2020, 1, 1, tzinfo=UTC))
            return made

        def custodian(self, env: ProducerEnv) -> Any:
            made: Any = super().custodian(env)
            settle_now = made.settle_now

            def told(lease: Lease, entries: Any) -> SettleReport:
                deadlines.append(lease.deadline)
                report: SettleReport = settle_now(lease, entries)
                return report

            made.settle_now = told
            return made

    deadlines: list[datetime] = []
    monkeypatch.setattr(Sums, "producer", Waited(queue="sums", path="/replaced"))
    run = Run(tmp_path, context={"now": 3})
    run.send([3])

    run.process()

    # Then it is the lease that the receipt has renewed
    [deadline] = deadlines
    assert deadline > datetime.now(UTC)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_no_failure_of_a_callback_ends_it_and_gives_back(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    made = execution(run)
    # Where no callback is at work.
    monkeypatch.setattr(
        "airflow_broadway.staging.writer.ProcessWriter.messages", _raiser(error("enough"))
    )

    with pytest.raises(error):
        made.run()

    check_given_back(run)
    assert run.staged.state("a" * 32) == SETTLED


def test_a_message_that_a_callback_swapped_for_another_fails_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Sums.handle_message

    def swapping(self: Sums, processor: str, message: Message, context: Any) -> Message:
        if message.data == b"1":
            return message.with_message_id("made-up")
        return handle(self, processor, message, context)

    monkeypatch.setattr(Sums, "handle_message", swapping)

    reference = execution(run).run()

    assert (reference["received"], reference["failed"]) == (COUNT, 6)
    run.batch(reference)
    assert run.ack()["balanced"]
    assert 1 in run.dead()


def test_a_lease_that_lapsed_meanwhile_is_not_published(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a sweep that gave the messages back while they were handled
    given_back: list[int] = []

    def slow(*_: Any) -> None:
        with run.queue() as queue:
            given_back.append(queue.release("a" * 32).released)

    precede(monkeypatch, slow, Sums, "handle_message", once=True)

    with pytest.raises(LeaseLapsed):
        execution(run).run()

    assert given_back == [10]  # what the processors can take
    assert run.staged.manifest("a" * 32) is None
    check_given_back(run)


def test_a_staging_that_fails_gives_back_even_if_that_cannot_be_noted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a disk that takes no manifest, and no journal either
    from airflow_broadway.staging.store import Folder

    create = Folder.create

    def full(self: Folder, path: str, text: str) -> bool:
        if "manifest" in path or "journal" in path:
            raise StagingError("no space is left")
        return create(self, path, text)

    monkeypatch.setattr(Folder, "create", full)
    with pytest.raises(StagingError, match="no space"):
        execution(run).run()
    monkeypatch.undo()

    # Then the messages are back at once, not when their lease lapses; and the sum is right
    check_given_back(run)
    assert run.ack()["balanced"]


def _raiser(error: BaseException) -> Any:
    def raise_it(*_: Any, **__: Any) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize("callback", ["handle_failed", "prepare_messages"])
def test_a_message_for_which_a_callback_returned_another_is_not_acked(
    tmp_path: Path, callback: str
) -> None:
    # Given a callback that makes messages anew, without their ids
    def anew(self: Any, messages: list[Message], context: Any) -> list[Message]:
        return [Message(b"7") for _ in messages]

    kind = type("Anew", (Sums,), {callback: anew, "name": "Sums"})
    run = Run(tmp_path, pipeline=kind)
    run.send([7])

    run.batch(run.process())
    totals = run.ack()["totals"]

    # Then the broker has the message still, or as a dead letter
    assert totals["acked"] == 0
    assert sum(run.depth()) == 1
