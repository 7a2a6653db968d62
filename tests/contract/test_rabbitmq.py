from __future__ import annotations

import uuid
from typing import ClassVar

import pytest

from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.testing.contract import CustodyContract, DeadLettersContract
from tests.contract.rabbitmq_harness import RabbitHarness
from tests.rabbitmq_fixtures import wanted_server

pytestmark = pytest.mark.broker


@pytest.fixture(autouse=True)
def young_queues(monkeypatch):
    """No test kills this broker: its queues may be used immediately."""
    monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 0.0)


class OnRabbitMQ:
    queue_type: ClassVar[str] = "classic"

    @pytest.fixture
    def harness(self, request, tmp_path):
        url, queue = wanted_server().url, f"contract-{uuid.uuid4().hex}"
        # A child process starts slowly on a busy machine.
        lease = 60.0 if "killed_while_settling" in request.node.name else 6.0
        harness = RabbitHarness(url, queue, f"file://{tmp_path}", self.queue_type, lease)
        harness.declare()
        return harness


class TestRabbitMQ(OnRabbitMQ, CustodyContract):
    pass


class TestDeadLetters(OnRabbitMQ, DeadLettersContract):
    letters_killed: ClassVar[int] = 150


@pytest.mark.slow
class TestRabbitMQQuorum(OnRabbitMQ, CustodyContract):
    queue_type: ClassVar[str] = "quorum"
