"""``make faults`` in small: tasks killed under a real scheduler, at each broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.airflow_env import ROOT, home_of
from tests.airflow_home import made_home
from tests.faults.found import Found
from tests.faults.killing import KINDS
from tests.faults.runs import Case, airflow_for, run_case
from tests.rabbitmq_fixtures import skip_without_own_server
from tests.rabbitmq_server import find_server, given_url
from tests.sqs_fixtures import wanted_sqs

pytestmark = [pytest.mark.faults, pytest.mark.airflow, pytest.mark.spark]


def _case(
    folder: Path, broker: str, *, messages: int, kills: int, seed: int, step: int = 1
) -> Case:
    return Case(
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
    """Runs the case of a broker, each in the same Airflow."""
    folder = tmp_path_factory.mktemp("kills")
    cases = {
        # One kill of each kind.
        "sqlite": _case(folder, "sqlite", messages=1_500, kills=4, seed=7),
        # The seed kills a receiving and a settling task.  Even numbers need no Spark.
        "rabbitmq": _case(folder, "rabbitmq", messages=300, kills=2, seed=55, step=2),
    }
    if find_server() is None or given_url() is not None:
        del cases["rabbitmq"]
    with airflow_for(*cases.values()) as run:
        yield lambda broker: run(cases[broker])


def _check(found: Found, kills: int) -> None:
    assert found.mistakes == []
    assert found.lost == []
    assert found.unmarked == 0
    assert found.killed.total() == kills


@pytest.mark.timeout(900)
def test_killed_tasks_lose_nothing_and_repeat_nothing_unmarked(run):
    result = run("sqlite")

    _check(result, kills=4)
    assert set(result.killed) == set(KINDS)


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
    assert set(result.killed) == set(KINDS)
