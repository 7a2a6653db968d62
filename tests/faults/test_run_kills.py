"""``make faults`` in small: tasks killed under a real scheduler, at each broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.airflow_env import ROOT, home_of
from tests.faults.found import Found
from tests.faults.killing import KINDS
from tests.faults.runs import Case, run_case
from tests.rabbitmq_fixtures import skip_without_own_server
from tests.sqs_fixtures import wanted_sqs

pytestmark = [pytest.mark.faults, pytest.mark.airflow, pytest.mark.spark]


def _run(
    folder: Path, broker: str, *, messages: int, kills: int, seed: int, step: int = 1
) -> Found:
    found = run_case(
        Case(
            broker=broker,
            messages=messages,
            kills=kills,
            seed=seed,
            step=step,
            folder=folder / broker,
            home=home_of(ROOT, "airflow-test-faults"),
        )
    )
    assert found.mistakes == []
    assert found.lost == []
    assert found.unmarked == 0
    assert found.killed.total() == kills
    return found


@pytest.mark.timeout(900)
def test_killed_tasks_lose_nothing_and_repeat_nothing_unmarked(tmp_path: Path) -> None:
    found = _run(tmp_path, "sqlite", messages=1_500, kills=6, seed=7)

    assert set(found.killed) == set(KINDS)


@pytest.mark.broker
@pytest.mark.timeout(900)
def test_at_rabbitmq_too_where_receiving_and_settling_die(tmp_path: Path) -> None:
    skip_without_own_server()

    found = _run(tmp_path, "rabbitmq", messages=300, kills=2, seed=55, step=2)

    # By its seed: who receives, and who settles.  Even numbers need no Spark: see its other test.
    assert set(found.killed) == {"process", "ack"}


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.timeout(1800)
def test_at_sqs_too_whose_leases_are_its_own(tmp_path: Path) -> None:
    wanted_sqs()

    found = _run(tmp_path, "sqs", messages=2_000, kills=12, seed=20_130)

    assert set(found.killed) == set(KINDS)
