from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from airflow_broadway.testing.contract import CustodyContract
from tests.contract.rabbitmq_harness import RabbitHarness
from tests.rabbitmq_fixtures import wanted_server

pytestmark = pytest.mark.broker


def harness_of(folder: Path, kind: str, custody: str) -> RabbitHarness:
    made = RabbitHarness(
        wanted_server().url, f"contract-{uuid.uuid4().hex}", f"file://{folder}", kind, custody
    )
    made.declare()
    return made


class TestRabbitMQ(CustodyContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> RabbitHarness:
        return harness_of(tmp_path, "classic", "broker")


class TestRabbitMQQuorum(CustodyContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> RabbitHarness:
        return harness_of(tmp_path, "quorum", "broker")


class TestRabbitMQStaged(CustodyContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> RabbitHarness:
        return harness_of(tmp_path, "classic", "staged")
