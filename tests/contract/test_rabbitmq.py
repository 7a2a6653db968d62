from __future__ import annotations

import uuid
from pathlib import Path
from typing import ClassVar

import pytest

from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.testing.contract import CustodyContract, DeadLettersContract
from tests.contract.rabbitmq_harness import RabbitHarness
from tests.rabbitmq_fixtures import wanted_server

pytestmark = pytest.mark.broker


@pytest.fixture(autouse=True)
def young_queues(monkeypatch):
    """Nobody kills this broker: its queues may be used at once."""
    monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 0.0)


def harness_of(request: pytest.FixtureRequest, folder: Path, kind: str) -> RabbitHarness:
    url, queue = wanted_server().url, f"contract-{uuid.uuid4().hex}"
    # On a busy machine a child starts slowly.
    lease = 60.0 if "killed_while_settling" in request.node.name else 6.0
    made = RabbitHarness(url, queue, f"file://{folder}", kind, lease)
    made.declare()
    return made


class TestRabbitMQ(CustodyContract):
    @pytest.fixture
    def harness(self, request, tmp_path):
        return harness_of(request, tmp_path, "classic")


class TestDeadLetters(DeadLettersContract):
    letters_killed: ClassVar[int] = 150

    @pytest.fixture
    def harness(self, request, tmp_path):
        return harness_of(request, tmp_path, "classic")


@pytest.mark.slow
class TestRabbitMQQuorum(CustodyContract):
    @pytest.fixture
    def harness(self, request, tmp_path):
        return harness_of(request, tmp_path, "quorum")
