"""A fixture that opens a queue at each broker."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.contract.sqs_harness import SharedClock, moved_server
from tests.pubsub_server import StubServer
from tests.rabbitmq_fixtures import skip_without_own_server, wanted_server
from tests.rabbitmq_server import RabbitServer
from tests.traffic.brokers_kafka import KafkaTraffic
from tests.traffic.brokers_pubsub import PubSubTraffic
from tests.traffic.brokers_rabbitmq import RabbitMQTraffic, RestartableRabbitMQ
from tests.traffic.brokers_sqlite import SqliteTraffic
from tests.traffic.brokers_sqs import SqsTraffic


@pytest.fixture
def open_broker(request, tmp_path):
    """Returns a function that opens a broker by its kind and returns its adapter's constructor."""
    with ExitStack() as stack:

        def open_broker(kind, **options):
            if kind == "sqlite":
                return SqliteTraffic
            if kind == "sqs":
                moved, clock = moved_server()
                return lambda _: SqsTraffic(moved, clock, **options)
            if kind == "pubsub":
                clock = str(tmp_path / "clock")
                stub = stack.enter_context(StubServer(SharedClock(clock)))
                return lambda _: PubSubTraffic(stub, clock, **options)
            if kind == "rabbitmq":
                server = wanted_server()
                return lambda folder: RabbitMQTraffic(server, folder, **options)
            if kind == "restartable rabbitmq":
                skip_without_own_server()
                server = stack.enter_context(RabbitServer.start(tmp_path / "server"))
                return lambda folder: RestartableRabbitMQ(server, folder, **options)
            kafka = request.getfixturevalue(kind)
            return lambda folder: KafkaTraffic(kafka, folder, **options)

        yield open_broker
