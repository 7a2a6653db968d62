"""Batches of a Python batcher: which run, and what is recorded of them."""

from __future__ import annotations

from copy import copy
from typing import Any
from unittest import mock

import pytest

from airflow_broadway import Batcher
from airflow_broadway.core.clock import Clock
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.ownership import OwnershipLost
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.testing import ManualClock
from tests.unit.runs.steps import Run, Sums, balanced, precede


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    with run.queue() as queue:
        queue.send([b"%d" % (7 * number + 1) for number in range(25)])
    return run


def planned(run: Run, clock: Clock | None = None, **options: Any) -> PythonBatches:
    generation = run.process()["generation"]
    plan = plan_batches(run.staged, run.pipeline, "default", [generation], try_label="1")
    staged = copy(run.staged)
    staged.clock = clock or staged.clock
    return PythonBatches(staged, run.pipeline, plan, **options)


def recorded(batches: PythonBatches, run: Run) -> list[Outcome | None]:
    return [outcome for _, outcome in Recorded(run.staged).outcomes(batches.plan)]


def test_each_batch_gets_one_outcome(run):
    batches = planned(run)

    counts = batches.run()

    assert counts == {"batches": 3, "successful": 20, "failed": 5, "without_outcome": 0}
    assert [outcome.failed for outcome in recorded(batches, run) if outcome] == [2, 2, 1]
    # A second run counts the same, and calls nothing.
    before = run.calls()
    assert batches.run() == counts
    assert run.calls() == before


def test_messages_failed_by_the_splitter_fail_alone(tmp_path):
    def split(message, count):
        if message.data in (11, 12):
            raise KeyError("no field")
        return ("emit", 0) if count == 4 else ("cont", count + 1)

    class Split(Sums):
        batchers = {"default": Batcher(engine="python", batch_size=(0, split), max_demand=100)}

    run = Run(tmp_path, pipeline=Split, numbers=[1, 2, 3, 4, 11, 12, 13, 16, 17, 18])
    batches = planned(run)

    counts = batches.run()

    # Then they are one batch, which no callback sees, and their neighbours fill others
    assert counts == {"batches": 3, "successful": 8, "failed": 2, "without_outcome": 0}
    assert [call.number for call in run.calls()] == [1, 2, 3, 4, 13, 16, 17, 18]
    (failed,) = [outcome for outcome in recorded(batches, run) if outcome and outcome.failed]
    assert failed.error == "KeyError: 'no field'"
    report = run.ack()
    assert (report["totals"]["acked"], report["totals"]["dead_lettered"]) == (8, 2)
    assert run.dead() == [11, 12]


def test_batch_info_names_the_handling_try(run, monkeypatch):
    # Given a first try that is stopped at its first batch
    first = planned(run)
    tries: list[int] = []

    def release(self, batcher, messages, info, context):
        tries.append(info.attempt)
        first.stop()

    precede(monkeypatch, release, Sums, "handle_batch")
    first.run()
    PythonBatches(run.staged, run.pipeline, first.plan, try_number=3).run()

    # Then the remaining batches have the number of the try that handles them
    assert tries == [1, 3, 3]


def test_concurrent_outcome_stands(run, monkeypatch):
    # Given another try that records a batch while this one handles it
    batches = planned(run)

    def overtaken(self, batcher, messages, info, context):
        other = Outcome(
            batch_id=info.batch_id,
            batcher=batcher,
            plan=batches.plan.path,
            successful=info.size,
            failed=0,
            writer="another",
        )
        run.staged.files.create(paths.outcome(batches.plan.path, info.batch_id), other.dumps())

    precede(monkeypatch, overtaken, Sums, "handle_batch")

    counts = batches.run()

    assert counts == {"batches": 3, "successful": 25, "failed": 0, "without_outcome": 0}
    assert {outcome.writer for outcome in recorded(batches, run) if outcome} == {"another"}
    assert run.ack()["totals"]["acked"] == 25


def test_messages_released_meanwhile_get_no_outcome(run, monkeypatch):
    # Given a batch of a second, during which its messages are released
    clock = ManualClock()
    batches = planned(run, clock=clock)

    def given_back(*_):
        if len(run.calls()) == 10:
            clock.advance(1)
            run.sweep()

    precede(monkeypatch, given_back, Sums, "handle_batch")

    counts = batches.run()

    # Then what was seen a second ago does not serve to record it, nor to begin the next
    assert counts["without_outcome"] == 2
    assert [outcome is None for outcome in recorded(batches, run)] == [False, True, True]
    assert len(run.calls()) == 20
    assert run.depth() == (25, 0, 0, 0)


def test_outcome_after_release_settles_nothing(run, monkeypatch):
    # Given batches that are handled, and recorded, within the second after their messages were
    # given back
    batches = planned(run, clock=ManualClock())

    def given_back(*_):
        if len(run.calls()) == 10:
            run.sweep()

    precede(monkeypatch, given_back, Sums, "handle_batch")
    assert batches.run()["without_outcome"] == 0

    # Then all went back, and the account says so
    assert run.depth() == (25, 0, 0, 0)
    totals = balanced(run.ack())
    assert (totals["acked"], totals["released"]) == (0, 25)

    # And the next run has all of it again, marked
    later = run.next()
    before = len(run.calls())
    later.batch(later.process())
    again = later.calls()[before:]
    assert len(again) == 25
    assert all(call.redelivered for call in again)
    assert balanced(later.ack())
    assert run.depth()[:3] == (0, 0, 0)


def test_retry_fences_off_a_lost_try(run, monkeypatch):
    # Given a task that Airflow has lost, and whose retry does all there is within its first batch
    clock = ManualClock()
    batches = planned(run, name="default", clock=clock)
    again = PythonBatches(run.staged, run.pipeline, batches.plan, name="default", try_number=2)

    def lost(*_):
        assert again.run()["without_outcome"] == 0
        clock.advance(1)

    precede(monkeypatch, lost, Sums, "handle_batch", once=True)

    # Then it stops there, and handles nothing of what has an outcome
    with pytest.raises(OwnershipLost, match="try 2 of 'default' has begun, so try 1 stops here"):
        batches.run()
    assert len(run.calls()) == 25 + 10
    assert {outcome.try_number for outcome in recorded(batches, run) if outcome} == {2}

    # And another task's runs are nothing to it
    other = PythonBatches(run.staged, run.pipeline, batches.plan, name="default!1")
    assert other.run() == again.run()


def test_raising_batch_is_recorded_as_one_error(run, monkeypatch):
    batches = planned(run)

    monkeypatch.setattr(Sums, "handle_batch", mock.Mock(side_effect=ValueError("no such table")))

    counts = batches.run()

    assert (counts["failed"], counts["without_outcome"]) == (25, 0)
    errors = [outcome.error for outcome in recorded(batches, run) if outcome]
    assert errors == ["ValueError: no such table"] * 3
    assert run.ack()["totals"]["dead_lettered"] == 25
