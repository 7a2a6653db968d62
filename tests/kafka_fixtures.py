"""What Kafka tests share: one server of each kind for the whole session, started when first wanted.

The fixture ``kafka`` is Apache Kafka where its jars are there, else librdkafka's mock cluster.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.kafka_server import ApacheKafka, KafkaServer, MockKafka, find_jars, nearest_kafka

__all__ = [
    "apache_kafka",
    "kafka",
    "kafka_mock",
    "on_apache_kafka",
    "session_kafka",
    "skip_without_apache_kafka",
]


#: Of a test whose ``kafka`` must be Apache Kafka.
on_apache_kafka = pytest.mark.usefixtures("apache_kafka")


@cache
def session_kafka(kind: type[KafkaServer]) -> KafkaServer:
    """The server of this process; it ends with it."""
    folder = Path(tempfile.mkdtemp(prefix=f"broadway-kafka-{kind.kind}-"))
    server = kind.start(folder)

    def end() -> None:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return server


def skip_without_apache_kafka() -> None:
    """Skip a test of which the mock cluster can show nothing, where Maven could not be reached."""
    if find_jars() is None:
        pytest.skip("no Apache Kafka here: scripts/setup.sh --kafka, which needs mvn")


@pytest.fixture
def kafka():
    """The nearest to Apache Kafka that there is."""
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
    """librdkafka's mock cluster: in memory, and told to fail."""
    server = session_kafka(MockKafka)
    assert isinstance(server, MockKafka)
    return server
