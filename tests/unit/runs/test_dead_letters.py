"""Runs whose source is the dead letters."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RunSource
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.tasks import ProcessTask
from airflow_broadway.runs.unstaged import UnstagedTask
from tests.unit.runs.steps import PlainSums, Run

SOURCE = RunSource(kind=DEAD_LETTERS)


def mended(folder: Path, numbers: list[int], run_id: str) -> Run:
    """Messages that died; and another run, whose code would take some of them."""
    before = Run(folder, "manual__before")
    before.send(numbers)
    before.batch(before.process())
    before.ack()
    return Run(folder, run_id, finished=["manual__before"])


def test_a_run_of_the_dead_letters_handles_them_by_the_code_of_today(tmp_path: Path) -> None:
    # Given five dead letters: those divisible by seven, and by five
    run = mended(tmp_path, list(range(1, 16)), "manual__letters")
    assert run.dead() == [5, 7, 10, 14, 15]
    received = len(run.calls())

    # When a run takes them for its source, with code that fails as before
    task = ProcessTask(
        run.staged, run.pipeline, run.task(), run.ports, budget=Budget(), source=SOURCE
    )
    done = task.run()
    run.batch(done.reference)
    report = run.ack()

    # Then it has handled each once more, on its first attempt, and set those aside that fail again
    assert done.reference["received"] == report["totals"]["received"] == 5
    again = run.calls()[received:]
    assert sorted(each.number for each in again) == [5, 10, 15]
    assert all(each.redelivered and each.attempt == 1 for each in again)
    assert run.dead() == [5, 7, 10, 14, 15]
    assert report["balanced"]


def test_only_the_first_of_a_runs_producers_sends_them_back(tmp_path: Path) -> None:
    run = mended(tmp_path, [7], "manual__letters")
    task = ProcessTask(
        run.staged, run.pipeline, run.task(1), run.ports, index=1, budget=Budget(), source=SOURCE
    )
    assert task.run().reference["received"] == 0
    assert run.dead() == [7]


def test_a_run_without_staging_too(tmp_path: Path) -> None:
    run = mended(tmp_path, [7, 8], "manual__letters")
    plain = Run(tmp_path, "manual__plain", pipeline=PlainSums)
    task = UnstagedTask(
        run.staged, plain.pipeline, run.task(), run.ports, budget=Budget(), source=SOURCE
    )
    assert task.run().reference["received"] == 1
    assert run.dead() == [7]


def test_a_place_that_is_not_there_ends_the_run_before_it_receives(tmp_path: Path) -> None:
    run = Run(tmp_path, "manual__letters")
    task = ProcessTask(
        run.staged, run.pipeline, run.task(), run.ports, budget=Budget(), source=SOURCE
    )
    with pytest.raises(ProducerError, match="there is no queue file"):
        task.run()
    assert run.staged.generations() == []
