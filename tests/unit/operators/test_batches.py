"""Batches of a Python batcher: which run, and what is recorded of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.manifest import Outcome, paths
from airflow_broadway.operators._batches import PythonBatches
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.plans import outcomes_of
from tests.unit.operators.steps import Run, Sums


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    with made.queue() as queue:
        queue.send([b"%d" % (7 * number + 1) for number in range(25)])
    return made


def planned(run: Run) -> PythonBatches:
    generation = run.process()["generation"]
    plan = plan_batches(run.staged, run.pipeline, "default", [generation], try_label="1")
    return PythonBatches(run.staged, run.pipeline, plan)


def recorded(batches: PythonBatches, run: Run) -> list[Outcome | None]:
    return [outcome for _, outcome in outcomes_of(run.staged, batches.plan)]


def test_each_batch_gets_one_outcome(run: Run) -> None:
    batches = planned(run)

    counts = batches.run()

    assert counts == {"batches": 3, "successful": 20, "failed": 5, "without_outcome": 0}
    assert [outcome.failed for outcome in recorded(batches, run) if outcome] == [2, 2, 1]
    # A second run counts the same, and calls nothing.
    before = run.calls()
    assert batches.run() == counts
    assert run.calls() == before


def test_a_stop_leaves_the_rest_for_later(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = planned(run)
    handle = Sums.handle_batch

    def stopping(self: Sums, *given: Any) -> Any:
        batches.stop()
        return handle(self, *given)

    monkeypatch.setattr(Sums, "handle_batch", stopping)

    counts = batches.run()

    assert counts["without_outcome"] == 2
    assert [outcome is None for outcome in recorded(batches, run)] == [False, True, True]


def test_an_outcome_recorded_meanwhile_stands(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given another try that records a batch while this one handles it
    batches = planned(run)
    handle = Sums.handle_batch

    def overtaken(self: Sums, batcher: str, messages: Any, info: Any, context: Any) -> Any:
        other = Outcome(
            batch_id=info.batch_id,
            batcher=batcher,
            plan=batches.plan.path,
            successful=info.size,
            failed=0,
            writer="another",
        )
        run.staged.files.create(paths.outcome(batches.plan.path, info.batch_id), other.dumps())
        return handle(self, batcher, messages, info, context)

    monkeypatch.setattr(Sums, "handle_batch", overtaken)

    counts = batches.run()

    assert counts == {"batches": 3, "successful": 25, "failed": 0, "without_outcome": 0}
    assert {outcome.writer for outcome in recorded(batches, run) if outcome} == {"another"}
    assert run.ack()["totals"]["acked"] == 25


def test_messages_given_back_meanwhile_get_no_outcome(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = planned(run)
    handle = Sums.handle_batch

    def given_back(self: Sums, *given: Any) -> Any:
        if len(run.calls()) == 10:
            run.sweep()
        return handle(self, *given)

    monkeypatch.setattr(Sums, "handle_batch", given_back)

    counts = batches.run()

    # The look before a batch may be a second old; the one before recording never is.
    assert counts["without_outcome"] == 2
    assert [outcome is None for outcome in recorded(batches, run)] == [False, True, True]
    assert run.depth() == (25, 0, 0, 0)


def test_a_batch_that_raised_is_recorded_as_one_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = planned(run)

    def broken(self: Sums, *given: Any) -> Any:
        raise ValueError("no such table")

    monkeypatch.setattr(Sums, "handle_batch", broken)

    counts = batches.run()

    assert (counts["failed"], counts["without_outcome"]) == (25, 0)
    errors = [outcome.error for outcome in recorded(batches, run) if outcome]
    assert errors == ["ValueError: no such table"] * 3
    assert run.ack()["totals"]["dead_lettered"] == 25
