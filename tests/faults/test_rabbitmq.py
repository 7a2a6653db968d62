"""Runs RabbitMQ's custody cases: broker crashes, deleted queues, rejected publishes."""

from __future__ import annotations

import pytest

from airflow_broadway.producers.rabbitmq.broker import standing_queues
from tests.faults.rabbitmq_cases import CASES, QueueHarness
from tests.rabbitmq_fixtures import skip_without_own_server, wanted_server
from tests.rabbitmq_server import RabbitServer

pytestmark = [pytest.mark.faults, pytest.mark.broker]


@pytest.fixture(scope="module")
def killable_server(tmp_path_factory):
    """Starts a server that a test may kill."""
    skip_without_own_server()
    with RabbitServer.start(tmp_path_factory.mktemp("killable")) as server:
        yield server


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else [])
        for case in CASES
    ],
)
def test_nothing_is_lost_or_repeated_unmarked_when(case, tmp_path, request, monkeypatch):
    if not case.kills_server:  # then new queues are reliable immediately
        monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 0.0)
    server = request.getfixturevalue("killable_server") if case.kills_server else wanted_server()

    result = case.run(QueueHarness(server, tmp_path))

    assert result.mistakes == []
    assert result.lost == []
    assert result.unmarked == 0
