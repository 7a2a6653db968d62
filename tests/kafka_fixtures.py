"""Fixtures of Kafka tests: one server of each kind for the session, started on first use.

The fixture ``kafka`` is Apache Kafka where its jars exist, else librdkafka's mock cluster.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.kafka_server import ApacheKafka, KafkaServer, MockKafka, find_jars, nearest_kafka
from tests.server_process import at_end, session_folder

__all__ = [
    "apache_kafka",
    "kafka",
    "kafka_mock",
    "on_apache_kafka",
    "session_kafka",
    "skip_without_apache_kafka",
]


#: Marks a test whose ``kafka`` must be Apache Kafka.
on_apache_kafka = pytest.mark.usefixtures("apache_kafka")


@cache
def session_kafka(kind: type[KafkaServer]) -> KafkaServer:
    """Starts the server of this process, once; it ends with the session."""
    server = kind.start(session_folder(f"kafka-{kind.kind}"))
    at_end.callback(server.kill)
    return server


def skip_without_apache_kafka() -> None:
    """Skips a test that the mock cluster cannot run, where Apache Kafka is missing."""
    if find_jars() is None:
        pytest.skip("no Apache Kafka here: scripts/setup.sh --kafka, which needs mvn")


@pytest.fixture
def kafka():
    """Apache Kafka, or else the mock cluster."""
    return session_kafka(nearest_kafka())


@pytest.fixture
def apache_kafka():
    """Apache Kafka itself."""
    skip_without_apache_kafka()
    server = session_kafka(ApacheKafka)
    assert isinstance(server, ApacheKafka)
    return server


@pytest.fixture
def kafka_mock():
    """librdkafka's mock cluster: in memory, with failures on request."""
    server = session_kafka(MockKafka)
    assert isinstance(server, MockKafka)
    return server
