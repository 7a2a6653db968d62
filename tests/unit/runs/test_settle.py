"""A step killed at an instant of its own choosing, tried again: nothing lost, nothing unmarked."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest

from airflow_broadway.core.errors import BroadwayError, LeaseLapsed
from airflow_broadway.producers.sqlite import SqliteQueue
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.run_folder import StagedRun
from tests.unit.runs.steps import PlainSums, Point, Run, Sums, balanced, dies, precede

COUNT = 60
SEVENS = [n for n in range(COUNT) if n % 7 == 0]
FIVES = [n for n in range(COUNT) if n % 5 == 0 and n % 7]
DEAD = sorted(SEVENS + FIVES)

_FOLDER = "airflow_broadway.staging.store:Folder"


def creates(part: str) -> Any:
    """Whether a call of ``Folder.create`` writes a file of this name."""
    return lambda folder, path, *_: part in path


PROCESS = [
    Point("airflow_broadway.producers.sqlite.queue:SqliteQueue.receive", "after"),
    Point(f"{_FOLDER}.create", "before", when=creates("_open/")),
    Point(f"{_FOLDER}.create", "after", when=creates("_open/")),
    Point(f"{_FOLDER}.create", "after", when=creates("generations/")),
    Point("tests.unit.runs.steps:Sums.handle_message", "before", 37),
    Point("airflow_broadway.staging.writer:ProcessWriter.close", "after"),
    Point(f"{_FOLDER}.create", "before", when=creates("manifest.json")),
    Point(f"{_FOLDER}.create", "after", when=creates("manifest.json")),
]
SETTLE = [
    Point(f"{_FOLDER}.create", "before", when=creates("journal-intent")),
    Point(f"{_FOLDER}.create", "after", when=creates("journal-intent")),
    Point("airflow_broadway.producers.sqlite.queue:SqliteQueue.settle", "after"),
    Point(f"{_FOLDER}.create", "after", when=creates("journal-settled")),
    Point("airflow_broadway.staging.run_folder:StagedRun.forget_open", "after"),
    Point("airflow_broadway.runs.account.mark_balanced", "before"),
]
ACCOUNT = ("forget_open", "mark_balanced")
PLAIN = [point for point in SETTLE if not point.function.endswith(ACCOUNT)]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, numbers=range(COUNT))


def check(run: Run, report: dict[str, Any], *, dead: list[int] = DEAD) -> None:
    """Asserts that each message is settled once, by all witnesses."""
    totals = report["totals"]
    assert report["balanced"], totals
    assert (totals["acked"], totals["dead_lettered"]) == (COUNT - len(dead), len(dead)), totals
    assert (totals["lapsed"], totals["settle_failed"], totals["still_leased"]) == (0, 0, 0)
    assert run.dead() == dead
    assert run.depth() == (0, 0, 0, len(dead))
    assert run.unmarked() == []
    # A death is no failure: nothing has used an attempt.
    assert {call.attempt for call in run.calls()} <= {1}
    with run.queue() as queue:
        assert queue.leases() == []
    assert run.staged.dag.list("_open") == []


@pytest.mark.faults
@pytest.mark.parametrize("point", PROCESS, ids=str)
def test_killed_process_task_is_retried(run, point):
    dies(run.process, point)

    run.batch(run.process(try_number=2))
    check(run, run.ack())

    handled = sorted(call.number for call in run.calls())
    assert handled == [number for number in range(COUNT) if number % 7]


@pytest.mark.faults
def test_killed_batcher_reruns_the_same_batches(run):
    # Given a batcher that was killed in its first batch, before any outcome
    reference = run.process()
    dies(lambda: run.batch(reference), Point("tests.unit.runs.steps.note", "after", 1))
    seen = {call.batch_id for call in run.calls()}

    # When its retry finds another batch_size
    changed = Run(run.folder, batchers={"default": {"batch_size": 7}})
    changed.batch(reference, try_number=2)
    check(changed, changed.ack())

    # Then what came again came under the id that it had
    again = [call for call in run.calls() if call.batch_id in seen]
    assert len(again) == 2 * 10


@pytest.mark.faults
@pytest.mark.parametrize("point", SETTLE, ids=str)
def test_sensor_killed_while_settling_settles_once(run, point):
    run.batch(run.process())
    dies(run.ack, point)

    first = run.ack()
    check(run, first)

    # And whoever looks again sees the same.
    assert {**run.ack(), "at": ""} == {**first, "at": ""}


@pytest.mark.faults
@pytest.mark.parametrize("point", PLAIN, ids=str)
def test_unbatched_pipeline_killed_while_settling(tmp_path, point):
    run = Run(tmp_path, pipeline=PlainSums, numbers=range(COUNT))
    dies(run.process, point)

    # The retry finds what the dead try had decided, and does not undo it.
    run.process(try_number=2)
    report = run.ack()

    assert report["balanced"]
    assert run.dead() == SEVENS
    assert run.depth() == (0, 0, 0, len(SEVENS))
    assert report["totals"]["acked"] == COUNT - len(SEVENS)


@pytest.mark.faults
@pytest.mark.parametrize("moment", ["before", "after"])
def test_kill_at_an_immediate_settlement(tmp_path, moment):
    run = Run(tmp_path, context={"now": 13, "now_in_batch": 33}, numbers=range(COUNT))
    now = "airflow_broadway.producers.sqlite.queue:SqliteQueue.settle_now"
    dies(run.process, Point(now, moment))

    reference = run.process(try_number=2)
    dies(lambda: run.batch(reference), Point(now, moment))
    run.batch(reference, try_number=2)
    report = run.ack()

    assert report["balanced"], report["totals"]
    assert report["totals"]["lapsed"] == 0
    assert run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))
    assert run.unmarked() == []


@pytest.mark.faults
@pytest.mark.parametrize("point", PLAIN, ids=str)
def test_killed_sweep_is_completed(run, point):
    # Given a run that Airflow shows finished, and that still holds its messages
    run.process()
    later = run.next()
    dies(later.sweep, point)

    # When the next process task sweeps
    later.batch(later.process())
    report = later.ack()

    # Then what had no outcome came back, and what had failed before any batch was a dead letter
    assert balanced(report)["received"] == COUNT - len(SEVENS)
    assert run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))
    assert len(run.calls()) == COUNT - len(SEVENS)
    assert all(call.redelivered and call.attempt == 1 for call in run.calls())


# --------------------------------------------------------------------------------- who has outcomes


def test_sweep_settles_recorded_outcomes_of_a_dead_run(run):
    # Given a run whose batches are done and whose sensor somebody marked
    run.batch(run.process(max_messages=30))

    # When the next run sweeps
    report = run.next().all()

    # Then its outcomes were carried out: nothing is handled again
    assert len(run.calls()) == len({call.message_id for call in run.calls()})
    assert report["totals"]["received"] == 30
    assert run.dead() == DEAD
    assert run.depth() == (0, 0, 0, len(DEAD))


@pytest.mark.parametrize("settled", [False, True], ids=["unsettled", "settled by its task"])
def test_sweep_reports_a_dead_run_and_marks_it_for_removal(tmp_path, settled):
    # Given a run that nobody goes on with; without batchers its messages are settled already
    pipeline = PlainSums if settled else Sums
    dead = Run(tmp_path, pipeline=pipeline)
    dead.send(range(COUNT))
    dead.process()

    # When the next run begins
    later = Run(tmp_path, "manual__2", finished=["manual__1"], pipeline=pipeline)
    later.process()

    # Then the dead one has a report that balances, and its mark: retention removes it in time
    report = json.loads(dead.staged.files.read("report.json"))
    assert balanced(report)["received"] == COUNT
    assert [name.partition("-")[2] for name in dead.staged.dag.list("_balanced")] == [
        f"{encode_name('manual__1')}.json"
    ]
    assert len(dead.staged.dag.list("_open")) == 1, "only the later one is open"


def test_sweep_releases_messages_without_outcome(run):
    run.process(max_messages=30)

    later = run.next()
    report = later.all()

    # Only what had failed before any batch had an outcome.
    assert report["totals"]["received"] == COUNT - 5
    redelivered = [call for call in later.calls() if call.redelivered]
    assert len(redelivered) == len([n for n in range(30) if n % 7])
    assert run.dead() == DEAD


def test_clearing_process_releases_even_recorded_outcomes(run):
    # Given a run whose batches are done, not yet settled
    reference = run.process()
    run.batch(reference)

    # When somebody clears the process task
    reference = run.process(try_number=2)
    run.batch(reference, try_number=2)
    check(run, run.ack())

    # Then all was received and handled again, marked
    assert len(run.calls()) == 2 * len([n for n in range(COUNT) if n % 7])


def test_plan_voided_by_clearing_process_counts_no_batches(run):
    # Given batches that were planned, none of them handled
    run.plan(run.process())

    # When process is cleared
    run.batch(run.process(try_number=2), try_number=2)
    report = run.ack()

    # Then the report counts every message in one batch
    check(run, report)
    assert report["batchers"]["default"]["messages"] == len(run.calls())


def test_zombie_of_an_older_try_cannot_publish(run, monkeypatch):
    # Given a process task that is about to publish when its retry starts next to it
    references: list[dict[str, Any]] = []

    def late(*_):
        references.append(run.process(try_number=2))

    precede(monkeypatch, late, StagedRun, "publish", once=True)
    with pytest.raises(LeaseLapsed, match="settled before it was complete"):
        run.process()

    run.batch(*references)
    check(run, run.ack())


def test_concurrent_tries_record_each_outcome_once(run, monkeypatch):
    # Given a try whose supervisor died: it works on while the next begins, at its second batch
    reference = run.process()
    begun: list[int] = []

    def overtaken(*_):
        begun.append(1)
        if len(begun) == 2:
            run.batch(reference, try_number=2)

    precede(monkeypatch, overtaken, Sums, "handle_batch")
    run.batch(reference)

    check(run, run.ack())


def test_concurrent_sensor_and_stand_in_agree(run, monkeypatch):
    run.batch(run.process())
    nested: list[dict[str, Any]] = []

    def retry(*_, **__):
        nested.append(run.ack())

    precede(monkeypatch, retry, SqliteQueue, "settle", once=True)
    report = run.ack()

    check(run, report)
    assert nested[0]["totals"] == report["totals"]


@pytest.mark.faults
def test_stand_in_completes_settlement_begun_by_sensor(run):
    # Given a run none of whose batches has an outcome, and a sensor that died at its last look
    run.process()
    dies(run.ack, Point(f"{_FOLDER}.create", "after", when=creates("journal-intent")))

    # When somebody settles who else settles only what has an outcome
    watcher = run.watcher()
    watcher.settle(final=False)
    watcher.close()

    # Then all messages are released: nothing more will be recorded
    assert [generation.state for generation in run.staged.generations()] == ["settled"]
    assert balanced(run.ack())["released"] == COUNT - len(SEVENS)


@pytest.mark.faults
def test_generation_without_all_outcomes_is_not_settled_before_the_last_look(run):
    # Given a run of six batches, of which only the first has been handled
    reference = run.process()
    dies(lambda: run.batch(reference), Point("tests.unit.runs.steps.note", "after", 2))
    outcomes = len(run.staged.files.list("outcomes/default"))

    run.ack(final=False)

    [generation] = run.staged.generations()
    assert generation.state not in ("settling", "settled")
    assert outcomes
    assert run.depth() == (0, 0, COUNT, 0)

    run.batch(reference, try_number=2)
    run.ack(final=False)
    check(run, run.ack())


def test_last_look_releases_messages_of_a_running_process_task(run, monkeypatch):
    def timed_out(self, processor, message, context):
        if int(message.data) == 20:
            run.ack()

    precede(monkeypatch, timed_out, Sums, "handle_message")
    with pytest.raises(BroadwayError):
        run.process()

    assert run.depth() == (COUNT, 0, 0, 0)
    assert balanced(run.ack())


def test_lapsed_lease_is_reported_and_balances(run):
    # Given a run whose lease another receiver found lapsed
    short = Run(run.folder, pipeline=Sums)
    short.pipeline = Sums(
        producer={"path": str(run.folder / "queue.db"), "lease": 0.2},
        context={"calls": run.calls_path},
    )
    reference = short.process()
    import time

    time.sleep(0.3)
    with run.queue() as queue:
        taken = queue.receive("another", 5)
    assert len(taken) == 5

    # When its batcher starts: no callback gets messages without a lease
    counts = short.batch(reference)
    assert counts is not None
    assert counts["without_outcome"] == counts["batches"]
    assert short.calls() == []

    assert balanced(short.ack())["lapsed"] == COUNT


def test_same_messages_in_two_generations_have_separate_outcomes(tmp_path):
    run = Run(tmp_path, batchers={"default": {"batch_size": 2}}, numbers=[1, 5])
    first = run.process()

    # When the lease of the first task has lapsed, and the second receives its messages
    with closing(sqlite3.connect(tmp_path / "queue.db")) as db, db:
        db.execute("UPDATE leases SET deadline = 0")
    second = run.process(1)
    assert (first["received"], second["received"]) == (2, 2)
    run.batch(first, second)

    # Then the message that failed is a dead letter, as the outcome of the second says
    assert len({call.batch_id for call in run.calls()}) == 2
    assert run.ack()["totals"]["dead_lettered"] == 1
    assert run.dead() == [5]
    assert run.depth() == (0, 0, 0, 1)
