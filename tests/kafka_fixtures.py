"""What Kafka tests share: one server of each kind for the whole session, started when first wanted.

A test with the fixture ``kafka`` runs once on each peer that is there; ``@on_peers(TRANSACTIONS)``
leaves those out that cannot serve it.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.kafka_server import (
    KafkaServer,
    MockKafka,
    NoidaKafka,
    RealKafka,
    find_noida,
    given_bootstrap,
)
from tests.rabbitmq_fixtures import in_ci

__all__ = ["kafka", "kafka_mock", "kafka_noida", "on_peers", "session_kafka", "wanted_kafka"]

_PEERS: dict[str, type[KafkaServer]] = {
    peer.kind: peer
    for peer in (MockKafka, NoidaKafka, *((RealKafka,) if given_bootstrap() else ()))
}


def on_peers(*abilities: str) -> pytest.MarkDecorator:
    """Let a test's ``kafka`` be each peer that has all of these."""
    names = [name for name, peer in _PEERS.items() if peer.can.issuperset(abilities)]
    return pytest.mark.parametrize("kafka", names, indirect=True)


@cache
def session_kafka(kind: str) -> KafkaServer:
    """The server of this process; it ends with it."""
    folder = Path(tempfile.mkdtemp(prefix=f"broadway-kafka-{kind}-"))
    server = _PEERS[kind].start(folder)

    def end() -> None:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return server


def wanted_kafka(kind: str) -> KafkaServer:
    """A peer, or a skipped test where noida-db has no release for the machine; CI must have it."""
    if kind == NoidaKafka.kind and find_noida() is None and not in_ci():
        pytest.skip("no noida-db here")
    return session_kafka(kind)


@pytest.fixture(params=list(_PEERS))
def kafka(request: pytest.FixtureRequest) -> KafkaServer:
    """Each peer, one after another."""
    return wanted_kafka(request.param)


@pytest.fixture
def kafka_mock() -> MockKafka:
    """librdkafka's mock cluster: in memory, and told to fail."""
    server = wanted_kafka(MockKafka.kind)
    assert isinstance(server, MockKafka)
    return server


@pytest.fixture
def kafka_noida() -> NoidaKafka:
    """noida-db: transactions, retention, instants, groups."""
    server = wanted_kafka(NoidaKafka.kind)
    assert isinstance(server, NoidaKafka)
    return server
