"""What could settle a message wrongly, or leave it held, on the way through a run's tasks."""

from __future__ import annotations

import json
import os
import threading
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from airflow_broadway import Batcher, Message, RetryPolicy
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import (
    LeaseLapsed,
    ProducerError,
    ProducerUnavailable,
    StagingError,
)
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.heartbeat import Hold
from airflow_broadway.runs.ports import Ports
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.sweep import remove_old_runs
from airflow_broadway.runs.tasks import send_depth
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.batch_reader import BatchReader
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.settling.journal import record_settled
from airflow_broadway.staging.settling.settlement import build_settlement
from airflow_broadway.staging.writer import ProcessWriter
from airflow_broadway.testing import ManualClock
from tests.unit.runs.steps import Point, Run, Sums, dies


class Mute(Exception):
    """An exception that cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Speechless(Sums):
    """Its failures have no text, in the processor (7) and in the batch (5)."""

    producer: Any = SqliteProducer(
        queue="sums", path="/replaced", retry=RetryPolicy(max_attempts=1)
    )

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = int(message.data)
        message = message.put_data(number)
        return message.failed(Mute()) if number % 7 == 0 else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [each.failed(Mute()) if each.data % 5 == 0 else each for each in messages]


def filled(run: Run, count: int = 10) -> Run:
    run.send(range(1, count + 1))
    return run


def test_a_failure_whose_reason_has_no_text_is_a_failure(tmp_path: Path) -> None:
    run = filled(Run(tmp_path, pipeline=Speechless))

    run.batch(run.process())
    report = run.ack()

    assert report["balanced"]
    assert run.dead() == [5, 7, 10]
    with run.queue() as queue:
        assert {each.reason for each in queue.dead_letters()} == {"Mute: (its text cannot be had)"}


def test_a_verdict_that_cannot_be_written_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a disk that refuses the lines of failed messages
    run = filled(Run(tmp_path))

    def refused(*_: object, **__: object) -> None:
        raise StagingError("no room")

    monkeypatch.setattr(ProcessWriter, "entries", refused)

    # Then that is the error, and everything went back
    with pytest.raises(StagingError, match="no room"):
        run.process()
    assert run.depth() == (10, 0, 0, 0)


def test_a_batch_whose_verdicts_cannot_be_kept_has_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given failures that cannot be judged
    run = filled(Run(tmp_path))
    reference = run.process()

    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("no verdict")

    monkeypatch.setattr("airflow_broadway.core.custody.acknowledger.RunAcknowledger.ack", broken)

    # Then the batch ends without an outcome, and its messages go back: none is acked
    with pytest.raises(RuntimeError, match="no verdict"):
        run.batch(reference)
    monkeypatch.undo()
    report = run.ack()
    assert (report["totals"]["acked"], report["totals"]["released"]) == (0, 9)


# --------------------------------------------------------------------------------------------------
# Leases
# --------------------------------------------------------------------------------------------------


def test_a_lease_renewed_while_messages_were_handled_is_published_as_it_is_then(
    tmp_path: Path,
) -> None:
    # Given messages that take longer to handle than their lease lasts, so that it is renewed
    renewed = threading.Event()

    class Slow(Sums):
        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            assert renewed.wait(10)
            return message.put_data(int(message.data))

    class Telling(SqliteProducer):
        def custodian(self, env: ProducerEnv) -> Any:
            made = super().custodian(env)
            renew = made.renew

            def told(lease: Lease) -> Lease | None:
                held = renew(lease)
                assert held is not None
                renewed.set()
                return replace(held, deadline=held.deadline + timedelta(hours=1))

            made.renew = told  # type: ignore[method-assign]
            return made

    Slow.producer = Telling(queue="sums", path="/replaced", lease=0.2)
    run = filled(Run(tmp_path, pipeline=Slow))

    reference = run.process()

    # Then the run knows until when it holds them: a stale deadline would void its batches
    lease = run.staged.lease(reference["generation"])
    assert lease.deadline > datetime.now(UTC) + timedelta(minutes=50)


def test_a_sensor_outlasts_a_broker_and_a_disk_that_are_away_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = filled(Run(tmp_path))
    run.process()
    watcher = run.watcher()

    def away(*_: object, **__: object) -> Any:
        raise ProducerUnavailable("locked")

    def full(*_: object, **__: object) -> Any:
        raise StagingError("no room")

    # When neither the heartbeat can be written nor the lease renewed
    with monkeypatch.context() as patch:
        patch.setattr("airflow_broadway.producers.sqlite.queue.SqliteQueue.renew", away)
        watcher.renew()
    with monkeypatch.context() as patch:
        patch.setattr("airflow_broadway.staging.store.Folder.replace", full)
        watcher.heartbeat.beat()
        watcher.renew()

    # Then that is told, and no more: a lease outlasts several renewals
    assert "locked" in caplog.text
    assert "no room" in caplog.text
    watcher.close()


def test_a_stand_in_looks_after_the_generations_of_its_own_batches_alone(tmp_path: Path) -> None:
    # Given two task groups of one pipeline in a run, on two queues
    run = filled(Run(tmp_path))
    other = Run(tmp_path)
    other.pipeline = Sums(
        producer={"path": str(tmp_path / "other.db")}, context={"calls": other.calls_path}
    )
    with SqliteQueue(tmp_path / "other.db", "sums") as queue:
        queue.send([b"1"])
    foreign = other.process(index=1)
    other.batch(foreign)
    own = run.process()
    run.batch(own)

    # When the one's batches end and no sensor looks
    watcher = RunWatcher(run.staged, run.pipeline, generations=[own["generation"]])
    with watcher.standing_in():
        pass

    # Then it settles its own, and does not begin with the other's
    assert run.staged.state(own["generation"]) == "settled"
    assert run.staged.state(foreign["generation"]) == "published"


# --------------------------------------------------------------------------------------------------
# The sensor
# --------------------------------------------------------------------------------------------------


def test_a_generation_that_cannot_be_settled_is_in_no_others_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two producers' messages, of which the broker refuses to settle the first's
    run = filled(Run(tmp_path))
    first = run.process(max_messages=5)
    second = run.process(index=1)
    run.batch(first, second)
    settle = SqliteQueue.settle

    def refuses(self: SqliteQueue, generation: str, settlement: Any, **more: Any) -> Any:
        if generation == first["generation"]:
            raise ProducerError("no")
        return settle(self, generation, settlement, **more)

    monkeypatch.setattr(SqliteQueue, "settle", refuses)
    with pytest.raises(ProducerError, match="no"):
        run.ack()

    # Then the other is settled all the same
    assert run.staged.state(second["generation"]) == "settled"
    monkeypatch.undo()
    assert run.ack()["balanced"]


def test_it_says_once_what_is_held_and_until_when(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = filled(Run(tmp_path))
    generation = run.process()["generation"]
    clock = ManualClock()
    [record] = run.staged.generations()
    hold = Hold(run.staged, "", clock)
    until = clock.now() + timedelta(hours=1)

    # When a sensor looks for the whole hour
    held = []
    for _ in range(361):
        held.append(hold.is_on(3600.0, ["handle_batches"], [record]))
        clock.advance(10.0)

    # Then it holds until the hour is over, and has said so in one line
    assert held == [True] * 360 + [False]
    [line] = [each for each in caplog.messages if "stay held" in each]
    assert f"until {until:%Y-%m-%d %H:%M:%S} UTC" in line
    assert f"process[0] ({generation})" in line


def test_a_run_whose_sum_is_not_right_is_on_no_list_of_runs_to_remove(tmp_path: Path) -> None:
    # Given a run that received three messages, and a journal that knows of two
    run = filled(Run(tmp_path), 3)
    run.batch(run.process())
    [record] = run.staged.generations()
    record_settled(run.staged, record, SettleReport(acked=2))

    # Then its report says so, and retention never comes to it
    assert not run.ack()["balanced"]
    assert run.staged.dag.list("_balanced") == []


def test_the_time_of_holding_begins_with_each_failure_anew(tmp_path: Path) -> None:
    # Given a run held after a failure, which somebody mended
    run = filled(Run(tmp_path))
    run.process()
    clock = ManualClock()
    staged = copy(run.staged)
    staged.clock = clock
    watcher = RunWatcher(staged, run.pipeline)

    def look(*failed: str) -> Any:
        return watcher.look(over=bool(failed), failed=failed, hold_failed=3600.0)

    assert look("handle_batches") is None
    clock.advance(3000.0)
    assert look() is None

    # When it fails again much later
    clock.advance(86_400.0)

    # Then it is held for the whole time again
    assert look("handle_batches") is None
    clock.advance(3601.0)
    assert look("handle_batches")["totals"]["released"]


# --------------------------------------------------------------------------------------------------
# Around a process task
# --------------------------------------------------------------------------------------------------


class Plain(Sums):
    """A pipeline that a task can name."""


def test_old_files_that_cannot_be_removed_are_in_no_runs_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> Any:
        raise StagingError("may not delete")

    monkeypatch.setattr("airflow_broadway.runs.sweep.sweep_retention", refused)
    run = Run(tmp_path)
    remove_old_runs(run.staged, run.pipeline)


def test_what_the_dead_were_writing_of_the_producers_own_is_removed_in_time(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    folder = tmp_path / "staging" / run.pipeline.name / "sqlite" / "some-queue"
    folder.mkdir(parents=True)
    old, young, whole = (folder / name for name in (".tmp-1", ".tmp-2", "notes.json"))
    for each in (old, young, whole):
        each.write_text("half")
    for each in (old, whole):
        os.utime(each, (0, 0))

    remove_old_runs(run.staged, run.pipeline)

    assert not old.exists()
    assert young.exists()
    assert whole.exists()


def test_a_queue_that_does_not_tell_its_depth_fails_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise OSError("no route")

    monkeypatch.setattr(SqliteProducer, "depth", broken)
    assert send_depth(Plain(), Ports(), cast("Any", None), Run(tmp_path).staged) is None


# --------------------------------------------------------------------------------------------------
# Messages made anew, and messages dropped
# --------------------------------------------------------------------------------------------------


class Anew(Sums):
    """Makes a message anew: with its id, but without what settles it."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = int(message.data)
        return Message(number, message_id=message.message_id) if number == 5 else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


def test_a_message_made_anew_fails_alone(tmp_path: Path) -> None:
    # It would count as settled already, and its failure in a batch as a success.
    run = filled(Run(tmp_path, pipeline=Anew))

    run.batch(run.process())
    report = run.ack()

    assert report["balanced"]
    assert (report["totals"]["acked"], report["totals"]["dead_lettered"]) == (9, 1)


class Forgetful(Sums):
    """Settles a message at once, and then does not return it."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = message.put_data(int(message.data))
        return message.failed("three") if message.data == 3 else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [each for each in messages if each.data != 5 or each.ack_immediately() is None]

    def handle_failed(self, messages: Any, context: Any) -> Any:
        for each in messages:
            each.ack_immediately()
        return []


def test_what_was_settled_at_once_is_not_given_back_as_well(tmp_path: Path) -> None:
    run = filled(Run(tmp_path, pipeline=Forgetful))
    reference = run.process()
    run.batch(reference)

    plans = Recorded(run.staged).deciding(run.pipeline.batchers, reference["generation"])
    settlement, complete, _ = build_settlement(
        run.staged, reference["generation"], run.pipeline, plans, final=False
    )

    assert complete
    assert (list(settlement.entries()), settlement.expected) == ([], 8)
    assert run.ack()["balanced"]


class Faithful(Forgetful):
    """Returns it too."""

    def handle_failed(self, messages: Any, context: Any) -> Any:
        return [each.ack_immediately() for each in messages]


@pytest.mark.parametrize("pipeline", [Forgetful, Faithful])
def test_what_was_settled_at_once_keeps_the_verdict_that_it_got(
    tmp_path: Path, pipeline: type[Sums]
) -> None:
    run = filled(Run(tmp_path, pipeline=pipeline))

    reference = run.process()

    manifest = run.staged.manifest(reference["generation"])
    assert manifest is not None
    [path] = manifest.entries
    line = json.loads(run.staged.files.read(path))
    assert (line["action"], line["reason"], line["settled"]) == ("dead_letter", "three", True)


@pytest.mark.faults
def test_what_a_dead_batch_had_settled_at_once_is_accounted_for(tmp_path: Path) -> None:
    # Given a batch that settles a message at once, and dies before it can say so
    run = filled(Run(tmp_path, context={"now_in_batch": 3}))
    reference = run.process()
    settle_now = "airflow_broadway.producers.sqlite.queue:SqliteQueue.settle_now"
    dies(lambda: run.batch(reference), Point(settle_now, "after"))

    # When nobody tries it again
    report = run.ack()

    # Then the sum is right, and stays so
    assert report["balanced"]
    assert (report["totals"]["acked"], report["totals"]["released"]) == (1, 8)
    assert run.ack()["totals"] == report["totals"]


@pytest.mark.faults
def test_what_a_dead_process_task_had_settled_at_once_is_accounted_for(tmp_path: Path) -> None:
    run = filled(Run(tmp_path, context={"now": 3}))
    writes = "airflow_broadway.staging.writer:ProcessWriter.close"
    dies(run.process, Point(writes, "before"))

    report = run.ack()

    assert report["balanced"]
    totals = report["totals"]
    assert (totals["received"], totals["acked"], totals["released"]) == (10, 1, 9)


def test_a_cleared_process_task_balances_what_it_had_settled_at_once(tmp_path: Path) -> None:
    # Given an execution that settled a message at once, and one more that did so in a batch
    run = filled(Run(tmp_path, context={"now": 3, "now_in_batch": 4}))
    run.batch(run.process())

    # When the process task is cleared
    run.batch(run.process(try_number=2))
    report = run.ack()

    # Then the sum is right for both executions
    assert report["balanced"]
    first = report["generations"][0]
    assert (first["received"], first["acked"], first["released"]) == (10, 2, 8)


def test_clearing_a_process_task_does_not_undo_a_settlement_that_was_begun(tmp_path: Path) -> None:
    # Given a run whose sensor died between the broker's settlement and its journal
    run = filled(Run(tmp_path, context={"now": 3}))
    run.batch(run.process())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("airflow_broadway.staging.settling.settlement.record_settled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.ack()

    # When the process task is cleared
    run.process(try_number=2)

    # Then the account is what the broker did
    [first, _] = run.ack()["generations"]
    assert first["balanced"]
    assert (first["acked"], first["dead_lettered"], first["released"]) == (7, 3, 0)


def interrupted(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


# --------------------------------------------------------------------------------------------------
# Python batches
# --------------------------------------------------------------------------------------------------


class Keyed(Sums):
    """Every message is of one key, a tuple; notes batches that run beside each other."""

    batchers = {
        "default": Batcher(engine="python", batch_size=1, batch_timeout=None, concurrency=3)
    }
    begun: list[Any] = []
    beside = threading.Event()
    at_work = threading.Semaphore(1)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data(int(message.data)).put_batch_key(("a", 1))

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        if not self.at_work.acquire(blocking=False):
            self.beside.set()
            return messages
        self.begun.append((messages[0].data, batch_info.batch_key, messages[0].batch_key))
        self.beside.wait(0.05)
        self.at_work.release()
        return messages


def test_batches_of_one_key_run_one_after_another_and_keep_their_key(tmp_path: Path) -> None:
    Keyed.begun.clear()
    Keyed.beside.clear()
    run = filled(Run(tmp_path, pipeline=Keyed), 5)

    run.batch(run.process())

    assert not Keyed.beside.is_set()
    assert Keyed.begun == [(number, ("a", 1), ("a", 1)) for number in range(1, 6)]


class Parted(Sums):
    """Batches in three partitions."""

    batchers = {
        "default": Batcher(
            engine="python",
            batch_size=1,
            batch_timeout=None,
            concurrency=3,
            partition_by=lambda message: message.data,
        )
    }


def test_a_plan_outlives_a_change_of_concurrency(tmp_path: Path) -> None:
    # Given a plan for three batch processors
    run = filled(Run(tmp_path, pipeline=Parted), 6)
    reference = run.process()
    plan = plan_batches(
        run.staged, run.pipeline, "default", [reference["generation"]], try_label="1"
    )

    # When it is run with one
    fewer = Run(tmp_path, pipeline=Parted, batchers={"default": {"concurrency": 1}})
    counts = PythonBatches(fewer.staged, fewer.pipeline, plan).run()

    assert counts["without_outcome"] == 0
    assert run.ack()["balanced"]


def test_a_batch_that_cannot_be_read_whole_has_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = filled(Run(tmp_path))
    reference = run.process()
    read = BatchReader.read
    monkeypatch.setattr(BatchReader, "read", lambda *given: read(*given)[:-1])

    with pytest.raises(StagingError, match="holds 9 messages, but 8 were read"):
        run.batch(reference)

    monkeypatch.undo()
    assert run.ack()["totals"]["acked"] == 0


class Now(Sums):
    """Settles at once, in the processor or in the batch, and notes what that raised."""

    raised: list[str] = []

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = message.put_data(int(message.data))
        return self.now(message) if context["at"] == "process" else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [self.now(each) for each in messages] if context["at"] == "batch" else messages

    def now(self, message: Message) -> Message:
        try:
            return message.ack_immediately()
        except LeaseLapsed as error:
            self.raised.append(str(error))
            raise


@pytest.mark.parametrize("at", ["process", "batch"])
def test_settling_at_once_says_so_when_the_messages_are_held_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    # Given a broker that has given the messages to another run
    Now.raised.clear()
    run = filled(Run(tmp_path, pipeline=Now, context={"at": at}), 1)

    def lapsed(self: SqliteQueue, generation: str, entries: Any) -> SettleReport:
        ids = frozenset(entry.message_id for entry in entries)
        return SettleReport(lapsed=len(ids), undone=ids)

    monkeypatch.setattr(SqliteQueue, "settle_now", lapsed)

    # Then the callback that settles at once learns it, as it does in a run of one process
    run.batch(run.process())
    assert Now.raised == ["the run no longer holds 1 of 1 message"]


def test_two_task_groups_of_a_run_are_held_each_for_its_own_time(tmp_path: Path) -> None:
    run = filled(Run(tmp_path))
    run.process()
    clock = ManualClock()

    records = run.staged.generations()

    # Given one that is held, beside one that is at work
    held, other = Hold(run.staged, "process,batch", clock), Hold(run.staged, "other", clock)
    assert held.is_on(60.0, ["batch"], records)
    clock.advance(59.0)
    other.end()

    # Then the one's time goes on
    clock.advance(2.0)
    assert not held.is_on(60.0, ["batch"], records)
