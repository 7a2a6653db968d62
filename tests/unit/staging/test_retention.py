from __future__ import annotations

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


def sweep(run: StagedRun, clock: ManualClock, **given: Any) -> list[str]:
    return sweep_retention(run.store, "Pipeline", "dag", clock=clock, **given)


def test_a_balanced_run_is_removed_after_a_week(tmp_path: Path) -> None:
    clock = ManualClock()
    run = settled_run(tmp_path, "a:1", clock)
    mark_balanced(run)

    clock.advance(KEEP)
    assert sweep(run, clock) == []
    clock.advance(1)
    assert sweep(run, clock) == ["a:1"]

    assert run.generations() == []
    assert sweep(run, clock) == []


def test_a_run_that_never_balanced_stays_whatever_its_age(tmp_path: Path) -> None:
    clock = ManualClock()
    run = settled_run(tmp_path, "a", clock)
    clock.advance(1000 * DAY)
    assert sweep(run, clock) == []
    assert len(run.generations()) == 1


def test_an_unsettled_generation_keeps_its_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a balanced run in which a task was cleared later
    clock = ManualClock()
    run = settled_run(tmp_path, "a", clock)
    mark_balanced(run)
    open_generation(run, try_number=2)
    clock.advance(8 * DAY)
    assert sweep(run, clock) == []
    assert "run 'a' was marked balanced but has an unsettled generation: kept" in caplog.text


def test_an_unsettled_generation_keeps_its_run_even_off_the_list(tmp_path: Path) -> None:
    clock = ManualClock()
    run = settled_run(tmp_path, "a", clock)
    mark_balanced(run)
    run.forget_open(open_generation(run, try_number=2).generation)
    clock.advance(8 * DAY)
    assert sweep(run, clock) == []


def test_a_run_that_balanced_again_counts_from_then(tmp_path: Path) -> None:
    clock = ManualClock()
    run = settled_run(tmp_path, "a", clock)
    mark_balanced(run)
    clock.advance(5 * DAY)
    mark_balanced(run)
    clock.advance(5 * DAY)
    assert sweep(run, clock) == []
    clock.advance(3 * DAY)
    assert sweep(run, clock) == ["a"]
    assert run.dag.list("_balanced") == []


def test_one_call_removes_a_bounded_number_oldest_first(tmp_path: Path) -> None:
    clock = ManualClock()
    for number in range(5):
        mark_balanced(settled_run(tmp_path, f"r{number}", clock))
        clock.advance(60)
    clock.advance(8 * DAY)
    run = open_run(tmp_path, clock=clock)
    assert sweep(run, clock, limit=2) == ["r0", "r1"]
    assert sweep(run, clock, limit=2) == ["r2", "r3"]


def test_a_sweep_removes_twenty_runs_at_most(tmp_path: Path) -> None:
    clock = ManualClock()
    for number in range(21):
        mark_balanced(settled_run(tmp_path, f"r{number}", clock))
    clock.advance(8 * DAY)
    run = open_run(tmp_path, clock=clock)
    assert [len(sweep(run, clock)) for _ in range(3)] == [20, 1, 0]


@pytest.mark.parametrize("gone", range(7))
def test_who_dies_amid_the_removal_of_a_folder_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    # Given a run of two executions of which some files are removed when the remover dies
    clock = ManualClock()
    run = settled_run(tmp_path, "a", clock)
    record_settled(run, open_generation(run, try_number=2), SettleReport(acked=1))
    mark_balanced(run)
    clock.advance(8 * DAY)
    calls = iter(range(gone))

    def dies(path: str) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        Path(path).unlink(missing_ok=True)

    def removed_in_some_order(backend: Any, path: str) -> None:
        for file in sorted(Path(path).rglob("*.json"), key=lambda file: file.parent.name):
            dies(str(file))

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "remove", lambda disk, path: dies(path))
        patched.setattr(Disk, "remove_tree", removed_in_some_order)
        with pytest.raises(KeyboardInterrupt):
            sweep(run, clock)

    # Then the next one removes the rest
    assert sweep(run, clock) == ["a"]
    assert not (tmp_path / run.path).exists()


def test_who_dies_while_removing_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    run = settled_run(tmp_path, "a", clock)
    mark_balanced(run)
    clock.advance(8 * DAY)
    with monkeypatch.context() as patched:
        patched.setattr("airflow_broadway.staging.store.Folder.remove", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sweep(run, clock)
    assert sweep(run, clock) == ["a"]
    assert run.dag.list("_balanced") == []


def test_an_old_run_that_is_at_work_again_is_spared(tmp_path: Path) -> None:
    # Given a run that balanced long ago, and was cleared
    clock = ManualClock()
    run = open_run(tmp_path, clock=clock)
    run.files.create("some/file", "text")
    mark_balanced(run)
    clock.advance(KEEP + 2)

    assert sweep(run, clock, spared=[run.run_id]) == []
    assert run.files.exists("some/file")
    assert sweep(run, clock) == [run.run_id]


def test_what_the_dead_were_writing_beside_the_runs_is_removed_too(tmp_path: Path) -> None:
    clock = ManualClock(datetime.now(UTC))
    run = settled_run(tmp_path, "a", clock)
    run.dag.create("_balanced/any.txt", "")
    strays = [tmp_path / "Pipeline/dag" / each / ".tmp-1" for each in ("", "_open", "_balanced")]
    for stray in strays:
        stray.write_text("half")

    sweep(run, clock)
    assert all(stray.exists() for stray in strays)

    clock.advance(KEEP + 60)
    sweep(run, clock)
    assert not any(stray.exists() for stray in strays)
