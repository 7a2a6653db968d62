from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.staging.disk import Disk
from airflow_broadway.staging.retention import KEEP, mark_balanced, sweep_retention
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.settling.journal import record_settled
from airflow_broadway.testing import ManualClock
from tests.unit.staging.kit import open_generation, open_run

DAY = 24 * 3600.0


def settled_run(root: Path, run_id: str, clock: ManualClock) -> StagedRun:
    run = open_run(root, run_id, clock)
    record_settled(run, open_generation(run), SettleReport(acked=1))
    return run


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def run(tmp_path, clock):
    """A settled run with its mark of balance."""
    run = settled_run(tmp_path, "a", clock)
    mark_balanced(run)
    return run


def sweep(run: StagedRun, clock: ManualClock, **options: Any) -> list[str]:
    return sweep_retention(run.store, "Pipeline", "dag", clock=clock, **options)


def test_balanced_run_is_removed_after_a_week(run, clock):
    clock.advance(KEEP)
    assert sweep(run, clock) == []
    clock.advance(1)
    assert sweep(run, clock) == ["a"]

    assert run.generations() == []
    assert sweep(run, clock) == []


def test_unbalanced_run_stays_at_any_age(tmp_path, clock):
    run = settled_run(tmp_path, "a", clock)
    clock.advance(1000 * DAY)
    assert sweep(run, clock) == []
    assert len(run.generations()) == 1


def test_unsettled_generation_keeps_its_run(run, clock, caplog):
    # Given a balanced run in which a task was cleared later
    open_generation(run, try_number=2)
    clock.advance(8 * DAY)
    assert sweep(run, clock) == []
    assert "run 'a' was marked balanced but has an unsettled generation: kept" in caplog.text


def test_unsettled_generation_keeps_its_run_even_unlisted(run, clock):
    run.forget_open(open_generation(run, try_number=2).generation)
    clock.advance(8 * DAY)
    assert sweep(run, clock) == []


def test_rebalanced_run_counts_from_then(run, clock):
    clock.advance(5 * DAY)
    run.files.replace("report.json", json.dumps({"at": clock.now().isoformat()}))
    mark_balanced(run)
    clock.advance(5 * DAY)
    assert sweep(run, clock) == []
    clock.advance(3 * DAY)
    assert sweep(run, clock) == ["a"]
    assert run.dag.list("_balanced") == []


def test_one_sweep_removes_a_bounded_number_oldest_first(tmp_path, clock):
    for number in range(5):
        mark_balanced(settled_run(tmp_path, f"r{number}", clock))
        clock.advance(60)
    clock.advance(8 * DAY)
    run = open_run(tmp_path, clock=clock)
    assert sweep(run, clock, limit=2) == ["r0", "r1"]
    assert sweep(run, clock, limit=2) == ["r2", "r3"]


def test_sweep_removes_twenty_runs_at_most(tmp_path, clock):
    for number in range(21):
        mark_balanced(settled_run(tmp_path, f"r{number}", clock))
    clock.advance(8 * DAY)
    run = open_run(tmp_path, clock=clock)
    assert [len(sweep(run, clock)) for _ in range(3)] == [20, 1, 0]


@pytest.mark.parametrize("gone", range(7))
def test_interrupted_removal_of_a_folder_is_completed_by_next_sweep(tmp_path, monkeypatch, gone):
    # Given a run of two executions of which some files are removed when the remover dies
    clock = ManualClock()
    run = settled_run(tmp_path, "a", clock)
    record_settled(run, open_generation(run, try_number=2), SettleReport(acked=1))
    mark_balanced(run)
    clock.advance(8 * DAY)
    calls = iter(range(gone))

    def dies(path):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        Path(path).unlink(missing_ok=True)

    def removed_in_some_order(backend, path):
        for file in sorted(Path(path).rglob("*.json"), key=lambda file: file.parent.name):
            dies(str(file))

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "remove", lambda disk, *paths: list(map(dies, paths)))
        patched.setattr(Disk, "remove_tree", removed_in_some_order)
        with pytest.raises(KeyboardInterrupt):
            sweep(run, clock)

    # Then the next one removes the rest
    assert sweep(run, clock) == ["a"]
    assert not (tmp_path / run.path).exists()


def test_interrupted_removal_is_completed_by_next_sweep(run, clock, monkeypatch):
    clock.advance(8 * DAY)
    with monkeypatch.context() as patched:
        patched.setattr("airflow_broadway.staging.store.Folder.remove", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sweep(run, clock)
    assert sweep(run, clock) == ["a"]
    assert run.dag.list("_balanced") == []


def test_active_old_run_is_spared(tmp_path, clock):
    # Given a run that balanced long ago, and was cleared
    run = open_run(tmp_path, clock=clock)
    run.files.create("some/file", "text")
    mark_balanced(run)
    clock.advance(KEEP + 2)

    assert sweep(run, clock, spared=[run.run_id]) == []
    assert run.files.exists("some/file")
    assert sweep(run, clock) == [run.run_id]


def test_stale_temporary_files_next_to_runs_are_removed(tmp_path):
    clock = ManualClock(datetime.now(UTC))
    run = settled_run(tmp_path, "a", clock)
    run.dag.create("_balanced/any.txt", "")
    strays = [tmp_path / "Pipeline/dag" / name / ".tmp-1" for name in ("", "_open", "_balanced")]
    for stray in strays:
        stray.write_text("half")

    sweep(run, clock)
    assert all(stray.exists() for stray in strays)

    clock.advance(KEEP + 60)
    sweep(run, clock)
    assert not any(stray.exists() for stray in strays)
