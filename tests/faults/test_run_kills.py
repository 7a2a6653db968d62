"""``make faults`` in small: each kind of task killed once at least, under a real scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.airflow_env import ROOT, home_of
from tests.faults.killing import KINDS
from tests.faults.runs import Case, run_case

pytestmark = [pytest.mark.faults, pytest.mark.airflow, pytest.mark.spark]


@pytest.mark.timeout(900)
def test_killed_tasks_lose_nothing_and_repeat_nothing_unmarked(tmp_path: Path) -> None:
    found = run_case(
        Case(
            broker="sqlite",
            messages=1_500,
            kills=6,
            seed=7,
            folder=tmp_path / "sqlite",
            home=home_of(ROOT, "airflow-test-faults"),
        )
    )

    assert found.mistakes == []
    assert found.lost == []
    assert found.unmarked == 0
    assert found.killed.total() == 6
    assert set(found.killed) == set(KINDS)
