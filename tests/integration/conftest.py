"""Fixtures of tests with a real broker or whole Dags."""

from __future__ import annotations

import pytest

from airflow_broadway.producers.rabbitmq.broker import standing_queues
from tests.kafka_group import KafkaGroup
from tests.rabbitmq_fixtures import wanted_server
from tests.rabbitmq_place import Place


@pytest.fixture
def undeclared(tmp_path, monkeypatch):
    """A RabbitMQ queue that is not declared yet."""
    # This broker is never killed: young holding queues are reliable.
    monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 0.0)
    return Place(wanted_server(), tmp_path)


@pytest.fixture
def place(undeclared):
    """A queue of the test's own at RabbitMQ."""
    undeclared.declare()
    return undeclared


@pytest.fixture
def group(kafka, tmp_path):
    """A topic and a consumer group of the test's own."""
    return KafkaGroup(kafka, tmp_path)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A queue, a staging root and the connections for ``dag.test()``."""
    from tests.integration.pipelines.puppets import Puppets
    from tests.integration.pipelines.running import World

    Puppets.calls.clear()
    Puppets.runs.clear()
    result = World(tmp_path, monkeypatch)
    yield result
    result.close()
