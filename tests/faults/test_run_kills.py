"""A small ``make faults``: kills tasks under a real scheduler, with each broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.airflow_env import ROOT, home_of
from tests.airflow_home import made_home
from tests.faults.case_result import CaseResult
from tests.faults.runs import RunCase, airflow_for, run_case
from tests.faults.task_killer import TASK_KINDS
from tests.rabbitmq_fixtures import skip_without_own_server
from tests.rabbitmq_server import find_server, given_url
from tests.sqs_fixtures import wanted_sqs

pytestmark = [pytest.mark.faults, pytest.mark.airflow, pytest.mark.spark]


def _case(
    folder: Path, broker: str, *, messages: int, kills: int, seed: int, step: int = 1
) -> RunCase:
    return RunCase(
        broker=broker,
        messages=messages,
        kills=kills,
        seed=seed,
        step=step,
        folder=folder / broker,
        home=made_home(home_of(ROOT, f"airflow-test-faults-{broker}")),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a function that runs a broker's case; all share one Airflow."""
    folder = tmp_path_factory.mktemp("kills")
    cases = {
        # One kill of each kind.
        "sqlite": _case(folder, "sqlite", messages=1_500, kills=4, seed=7),
        # With this seed, a receiving and a settling task are killed.  Even numbers need no Spark.
        "rabbitmq": _case(folder, "rabbitmq", messages=300, kills=2, seed=55, step=2),
    }
    if find_server() is None or given_url() is not None:
        del cases["rabbitmq"]
    with airflow_for(*cases.values()) as run:
        yield lambda broker: run(cases[broker])


def _check(result: CaseResult, kills: int) -> None:
    assert result.mistakes == []
    assert result.lost == []
    assert result.unmarked == 0
    assert result.killed.total() == kills


@pytest.mark.timeout(900)
def test_killed_tasks_lose_nothing_and_repeat_nothing_unmarked(run):
    result = run("sqlite")

    _check(result, kills=4)
    assert set(result.killed) == set(TASK_KINDS)


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.timeout(900)
def test_killed_rabbitmq_tasks_lose_nothing(run):
    skip_without_own_server()

    result = run("rabbitmq")

    _check(result, kills=2)
    assert set(result.killed) == {"process", "ack"}


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("broker", ["sqs", "kafka", "pubsub"])
def test_killed_tasks_of_other_brokers_lose_nothing(tmp_path, broker):
    if broker == "sqs":
        wanted_sqs()

    result = run_case(_case(tmp_path, broker, messages=2_000, kills=12, seed=20_130))

    _check(result, kills=12)
    assert set(result.killed) == set(TASK_KINDS)
