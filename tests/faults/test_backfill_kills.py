"""A small ``make faults``: kills archive runs, their backfills, and a requeue."""

from __future__ import annotations

import pytest

from scripts.airflow_env import ROOT, home_of
from tests.airflow_home import made_home
from tests.faults.backfills import BackfillCase, run_backfills
from tests.faults.requeues import RequeueCase, run_requeue_case
from tests.rabbitmq_fixtures import skip_without_own_server
from tests.sqs_fixtures import wanted_sqs

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.airflow
@pytest.mark.timeout(900)
def test_a_killed_archive_and_backfill_have_each_message_once(tmp_path):
    home = made_home(home_of(ROOT, "airflow-test-faults-past"))

    result = run_backfills(BackfillCase(messages=1_000, seed=20_130, folder=tmp_path, home=home))

    assert (result.mistakes, result.lost, result.unmarked) == ([], [], 0)
    assert set(result.killed) == {"process", "batch", "publication", "ack"}


@pytest.mark.broker
@pytest.mark.timeout(600)
@pytest.mark.parametrize("broker", ["sqlite", "rabbitmq", "sqs"])
def test_a_killed_requeue_command_loses_no_dead_letter(tmp_path, broker):
    if broker == "rabbitmq":
        skip_without_own_server()
    if broker == "sqs":
        wanted_sqs()

    result = run_requeue_case(
        RequeueCase(broker=broker, letters=600, kills=3, seed=7, folder=tmp_path)
    )

    assert (result.mistakes, result.lost, result.unmarked) == ([], [], 0)
    assert result.killed.total() == 3
