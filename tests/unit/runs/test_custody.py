"""Faults in a run's tasks that could settle a message wrongly, or never."""

from __future__ import annotations

import json
import os
import threading
from copy import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from unittest import mock

import pytest

from airflow_broadway import Batcher, Message, RetryPolicy
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
from airflow_broadway.staging.settling.journal import record_settled
from airflow_broadway.staging.settling.settlement import build_settlement
from airflow_broadway.staging.writer import ProcessWriter
from airflow_broadway.testing import ManualClock
from tests.unit.runs.steps import TEN, Point, Run, Sums, balanced, dies


class Mute(Exception):
    """An exception whose text raises."""

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
        return [
            message.failed(Mute()) if message.data % 5 == 0 else message for message in messages
        ]


def test_reason_without_text_is_still_a_failure(tmp_path):
    run = Run(tmp_path, pipeline=Speechless, numbers=TEN)

    report = run.all()

    assert report["balanced"]
    assert run.dead() == [5, 7, 10]
    with run.queue() as queue:
        assert {letter.reason for letter in queue.dead_letters()} == {
            "Mute: (its text cannot be had)"
        }


def test_unwritable_verdict_fails_the_task_and_releases(tmp_path, monkeypatch):
    # Given a disk that refuses the lines of failed messages
    run = Run(tmp_path, numbers=TEN)

    monkeypatch.setattr(ProcessWriter, "entries", mock.Mock(side_effect=StagingError("no room")))

    # Then that is the error, and everything went back
    with pytest.raises(StagingError, match="no room"):
        run.process()
    assert run.depth() == (10, 0, 0, 0)


def test_batch_without_stored_verdicts_has_no_outcome(tmp_path, monkeypatch):
    # Given failures that cannot be judged
    run = Run(tmp_path, numbers=TEN)
    reference = run.process()

    def broken(*_, **__):
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


def test_renewed_lease_is_published(tmp_path):
    # Given messages that take longer to handle than their lease lasts, so that it is renewed
    renewed = threading.Event()

    class Slow(Sums):
        def handle_message(self, processor, message, context):
            assert renewed.wait(10)
            return message.put_data(int(message.data))

    class Telling(SqliteProducer):
        def custodian(self, env):
            wrapped = super().custodian(env)
            renew = wrapped.renew

            def recorded(lease):
                renewed_lease = renew(lease)
                assert renewed_lease is not None
                renewed.set()
                return replace(renewed_lease, deadline=renewed_lease.deadline + timedelta(hours=1))

            wrapped.renew = recorded  # type: ignore[method-assign]
            return wrapped

    Slow.producer = Telling(queue="sums", path="/replaced", lease=0.2)
    run = Run(tmp_path, pipeline=Slow, numbers=TEN)

    reference = run.process()

    # Then the run knows until when it holds them: a stale deadline would void its batches
    lease = run.staged.lease(reference["generation"])
    assert lease.deadline > datetime.now(UTC) + timedelta(minutes=50)


def test_sensor_survives_unavailable_broker_and_disk(tmp_path, monkeypatch, caplog):
    run = Run(tmp_path, numbers=TEN)
    run.process()
    watcher = run.watcher()

    def away(*_, **__):
        raise ProducerUnavailable("locked")

    def full(*_, **__):
        raise StagingError("no room")

    # When neither the heartbeat can be written nor the lease renewed
    with monkeypatch.context() as patch:
        patch.setattr("airflow_broadway.producers.sqlite.queue.SqliteQueue.renew", away)
        watcher.renew()
    with monkeypatch.context() as patch:
        patch.setattr("airflow_broadway.staging.store.Folder.replace", full)
        watcher.heartbeat.beat()
        watcher.renew()

    # Then it is only logged: a lease outlasts several renewals
    assert "locked" in caplog.text
    assert "no room" in caplog.text
    watcher.close()


def test_stand_in_settles_only_generations_of_its_own_batches(tmp_path):
    # Given two task groups of one pipeline in a run, on two queues
    run = Run(tmp_path, numbers=TEN)
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


def test_unsettleable_generation_does_not_block_others(tmp_path, monkeypatch):
    # Given two producers' messages, of which the broker refuses to settle the first's
    run = Run(tmp_path, numbers=TEN)
    first = run.process(max_messages=5)
    second = run.process(index=1)
    run.batch(first, second)
    settle = SqliteQueue.settle

    def refuses(self, generation, settlement, **more):
        if generation == first["generation"]:
            raise ProducerError("no")
        return settle(self, generation, settlement, **more)

    monkeypatch.setattr(SqliteQueue, "settle", refuses)
    with pytest.raises(ProducerError, match="no"):
        run.ack()

    # Then the other is settled all the same
    assert run.staged.state(second["generation"]) == "settled"
    monkeypatch.undo()
    assert balanced(run.ack())


def test_hold_is_logged_once_with_its_deadline(tmp_path, caplog):
    run = Run(tmp_path, numbers=TEN)
    generation = run.process()["generation"]
    clock = ManualClock()
    [record] = run.staged.generations()
    hold = Hold(run.staged, "", clock)
    until = clock.now() + timedelta(hours=1)

    # When a sensor looks for the whole hour
    holds = []
    for _ in range(361):
        holds.append(hold.is_on(3600.0, ["handle_batches"], [record]))
        clock.advance(10.0)

    # Then it waits for an hour, and logs it once
    assert holds == [True] * 360 + [False]
    [line] = [message for message in caplog.messages if "stay held" in message]
    assert f"until {until:%Y-%m-%d %H:%M:%S} UTC" in line
    assert f"process[0] ({generation})" in line


def test_unbalanced_run_is_not_marked_for_removal(tmp_path):
    # Given a run that received three messages, and a journal that knows of two
    run = Run(tmp_path, numbers=range(1, 4))
    run.batch(run.process())
    [record] = run.staged.generations()
    record_settled(run.staged, record, SettleReport(acked=2))

    # Then its report says so, and retention never comes to it
    assert not run.ack()["balanced"]
    assert run.staged.dag.list("_balanced") == []


def test_hold_restarts_with_each_failure(tmp_path):
    # Given a run that waits after a failure, which was fixed
    run = Run(tmp_path, numbers=TEN)
    run.process()
    clock = ManualClock()
    staged = copy(run.staged)
    staged.clock = clock
    watcher = RunWatcher(staged, run.pipeline)

    def look(*failed):
        return watcher.look(over=bool(failed), failed=failed, hold_failed=3600.0)

    assert look("handle_batches") is None
    clock.advance(3000.0)
    assert look() is None

    # When it fails again much later
    clock.advance(86_400.0)

    # Then it waits for the whole time again
    assert look("handle_batches") is None
    clock.advance(3601.0)
    assert look("handle_batches")["totals"]["released"]


# --------------------------------------------------------------------------------------------------
# Around a process task
# --------------------------------------------------------------------------------------------------


class Plain(Sums):
    """A pipeline that a task can name."""


def test_unremovable_old_files_fail_no_run(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise StagingError("may not delete")

    monkeypatch.setattr("airflow_broadway.runs.sweep.sweep_retention", refused)
    run = Run(tmp_path)
    remove_old_runs(run.staged, run.pipeline)


def test_stale_temporary_files_of_producers_are_removed(tmp_path):
    run = Run(tmp_path)
    folder = tmp_path / "staging" / run.pipeline.name / "sqlite" / "some-queue"
    folder.mkdir(parents=True)
    old, young, whole = (folder / name for name in (".tmp-1", ".tmp-2", "notes.json"))
    for path in (old, young, whole):
        path.write_text("half")
    for path in (old, whole):
        os.utime(path, (0, 0))

    remove_old_runs(run.staged, run.pipeline)

    assert not old.exists()
    assert young.exists()
    assert whole.exists()


def test_unknown_depth_fails_no_task(tmp_path, monkeypatch):
    monkeypatch.setattr(SqliteProducer, "depth", mock.Mock(side_effect=OSError("no route")))
    assert send_depth(Plain(), Ports(), cast("Any", None), Run(tmp_path).staged) is None


# --------------------------------------------------------------------------------------------------
# Recreated and dropped messages
# --------------------------------------------------------------------------------------------------


class Anew(Sums):
    """Creates a message with the same id, but without its acknowledger."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = int(message.data)
        return Message(number, message_id=message.message_id) if number == 5 else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


def test_recreated_message_fails_alone(tmp_path):
    # It would count as settled already, and its failure in a batch as a success.
    run = Run(tmp_path, pipeline=Anew, numbers=TEN)

    report = run.all()

    totals = balanced(report)
    assert (totals["acked"], totals["dead_lettered"]) == (9, 1)


class Forgetful(Sums):
    """Settles a message at once, and then does not return it."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = message.put_data(int(message.data))
        return message.failed("three") if message.data == 3 else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [
            message
            for message in messages
            if message.data != 5 or message.ack_immediately() is None
        ]

    def handle_failed(self, messages: Any, context: Any) -> Any:
        for message in messages:
            message.ack_immediately()
        return []


def test_immediately_settled_messages_are_not_released_too(tmp_path):
    run = Run(tmp_path, pipeline=Forgetful, numbers=TEN)
    reference = run.process()
    run.batch(reference)

    plans = Recorded(run.staged).deciding(run.pipeline.batchers, reference["generation"])
    settlement, complete, _ = build_settlement(
        run.staged, reference["generation"], run.pipeline, plans, final=False
    )

    assert complete
    assert (list(settlement.entries()), settlement.expected) == ([], 8)
    assert balanced(run.ack())


class Faithful(Forgetful):
    """Returns it too."""

    def handle_failed(self, messages: Any, context: Any) -> Any:
        return [message.ack_immediately() for message in messages]


@pytest.mark.parametrize("pipeline", [Forgetful, Faithful])
def test_immediate_settlement_keeps_its_verdict(tmp_path, pipeline):
    run = Run(tmp_path, pipeline=pipeline, numbers=TEN)

    reference = run.process()

    manifest = run.staged.manifest(reference["generation"])
    assert manifest is not None
    [path] = manifest.entries
    line = json.loads(run.staged.files.read(path))
    assert (line["action"], line["reason"], line["settled"]) == ("dead_letter", "three", True)


@pytest.mark.faults
def test_immediate_settlement_of_a_dead_batch_is_accounted_for(tmp_path):
    # Given a batch that settles a message at once, and dies before it can say so
    run = Run(tmp_path, context={"now_in_batch": 3}, numbers=TEN)
    reference = run.process()
    settle_now = "airflow_broadway.producers.sqlite.queue:SqliteQueue.settle_now"
    dies(lambda: run.batch(reference), Point(settle_now, "after"))

    # When it is not retried
    report = run.ack()

    # Then the sum is right, and stays so
    totals = balanced(report)
    assert (totals["acked"], totals["released"]) == (1, 8)
    assert run.ack()["totals"] == report["totals"]


@pytest.mark.faults
def test_immediate_settlement_of_a_dead_process_task_is_accounted_for(tmp_path):
    run = Run(tmp_path, context={"now": 3}, numbers=TEN)
    writes = "airflow_broadway.staging.writer:ProcessWriter.close"
    dies(run.process, Point(writes, "before"))

    report = run.ack()

    totals = balanced(report)
    assert (totals["received"], totals["acked"], totals["released"]) == (10, 1, 9)


def test_cleared_process_task_balances_its_immediate_settlement(tmp_path):
    # Given an execution that settled a message at once, and one more that did so in a batch
    run = Run(tmp_path, context={"now": 3, "now_in_batch": 4}, numbers=TEN)
    run.batch(run.process())

    # When the process task is cleared
    run.batch(run.process(try_number=2))
    report = run.ack()

    # Then the sum is right for both executions
    assert report["balanced"]
    first = report["generations"][0]
    assert (first["received"], first["acked"], first["released"]) == (10, 2, 8)


def test_message_settled_immediately_is_not_settled_again_by_its_batch(tmp_path):
    run = Run(tmp_path, context={"now": 4, "now_in_batch": 4}, numbers=[4, 6])

    assert balanced(run.all())["acked"] == 2


def test_clearing_process_does_not_undo_a_begun_settlement(tmp_path):
    # Given a run whose sensor died between the broker's settlement and its journal
    run = Run(tmp_path, context={"now": 3}, numbers=TEN)
    run.batch(run.process())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("airflow_broadway.staging.settling.settlement.record_settled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.ack()

    # When the process task is cleared
    run.process(try_number=2)

    # Then the account is that of the broker
    [first, _] = run.ack()["generations"]
    assert first["balanced"]
    assert (first["acked"], first["dead_lettered"], first["released"]) == (7, 3, 0)


def interrupted(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


# --------------------------------------------------------------------------------------------------
# Python batches
# --------------------------------------------------------------------------------------------------


class Keyed(Sums):
    """All messages have one key, a tuple; records batches that run concurrently."""

    batchers = {
        "default": Batcher(engine="python", batch_size=1, batch_timeout=None, concurrency=3)
    }
    begun: list[Any] = []
    overlapped = threading.Event()
    at_work = threading.Semaphore(1)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data(int(message.data)).put_batch_key(("a", 1))

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        if not self.at_work.acquire(blocking=False):
            self.overlapped.set()
            return messages
        self.begun.append((messages[0].data, batch_info.batch_key, messages[0].batch_key))
        self.overlapped.wait(0.05)
        self.at_work.release()
        return messages


def test_batches_of_one_key_run_in_sequence_with_their_key(tmp_path):
    Keyed.begun.clear()
    Keyed.overlapped.clear()
    run = Run(tmp_path, pipeline=Keyed, numbers=range(1, 6))

    run.batch(run.process())

    assert not Keyed.overlapped.is_set()
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


def test_plan_survives_a_change_of_concurrency(tmp_path):
    # Given a plan for three batch processors
    run = Run(tmp_path, pipeline=Parted, numbers=range(1, 7))
    plan = run.plan(run.process())

    # When it is run with one
    fewer = Run(tmp_path, pipeline=Parted, batchers={"default": {"concurrency": 1}})
    counts = PythonBatches(fewer.staged, fewer.pipeline, plan).run()

    assert counts["without_outcome"] == 0
    assert balanced(run.ack())


def test_partially_read_batch_has_no_outcome(tmp_path, monkeypatch):
    run = Run(tmp_path, numbers=TEN)
    reference = run.process()
    read = BatchReader.read
    monkeypatch.setattr(BatchReader, "read", lambda *args: read(*args)[:-1])

    with pytest.raises(StagingError, match="holds 9 messages, but 8 were read"):
        run.batch(reference)

    monkeypatch.undo()
    assert run.ack()["totals"]["acked"] == 0


class Now(Sums):
    """Settles at once, in the processor or in the batch, and records the exception."""

    raised: list[str] = []

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = message.put_data(int(message.data))
        return self.now(message) if context["at"] == "process" else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [self.now(message) for message in messages] if context["at"] == "batch" else messages

    def now(self, message: Message) -> Message:
        try:
            return message.ack_immediately()
        except LeaseLapsed as error:
            self.raised.append(str(error))
            raise


@pytest.mark.parametrize("at", ["process", "batch"])
def test_immediate_settlement_of_lost_messages_raises(tmp_path, monkeypatch, at):
    # Given messages that the broker delivered to another run
    Now.raised.clear()
    run = Run(tmp_path, pipeline=Now, context={"at": at}, numbers=range(1, 2))

    def lapsed(self, generation, entries):
        ids = frozenset(entry.message_id for entry in entries)
        return SettleReport(lapsed=len(ids), undone=ids)

    monkeypatch.setattr(SqliteQueue, "settle_now", lapsed)

    # Then the callback that settles at once learns it, as it does in a run of one process
    run.batch(run.process())
    assert Now.raised == ["the run no longer holds 1 of 1 message"]


def test_task_groups_have_separate_hold_times(tmp_path):
    run = Run(tmp_path, numbers=TEN)
    run.process()
    clock = ManualClock()

    records = run.staged.generations()

    # Given a group with a failed task, and one that runs
    failed, other = Hold(run.staged, "process,batch", clock), Hold(run.staged, "other", clock)
    assert failed.is_on(60.0, ["batch"], records)
    clock.advance(59.0)
    other.end()

    # Then the one's time goes on
    clock.advance(2.0)
    assert not failed.is_on(60.0, ["batch"], records)
