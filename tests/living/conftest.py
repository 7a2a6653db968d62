"""A queue at each broker."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.contract.sqs_harness import SharedClock, moved_server
from tests.living.brokers_kafka import LivingKafka
from tests.living.brokers_pubsub import LivingPubSub
from tests.living.brokers_rabbitmq import LivingRabbit, MortalRabbit
from tests.living.brokers_sqlite import LivingSqlite
from tests.living.brokers_sqs import LivingSqs
from tests.pubsub_server import StubServer
from tests.rabbitmq_fixtures import skip_without_own_server, wanted_server
from tests.rabbitmq_server import RabbitServer


@pytest.fixture
def open_broker(request, tmp_path):
    """Opens a broker by its kind; returns a function that makes a queue with files in a folder."""
    with ExitStack() as stack:

        def open_broker(kind, **options):
            if kind == "sqlite":
                return LivingSqlite
            if kind == "sqs":
                moved, clock = moved_server()
                return lambda _: LivingSqs(moved, clock, **options)
            if kind == "pubsub":
                clock = str(tmp_path / "clock")
                stub = stack.enter_context(StubServer(SharedClock(clock)))
                return lambda _: LivingPubSub(stub, clock, **options)
            if kind == "rabbitmq":
                server = wanted_server()
                return lambda folder: LivingRabbit(server, folder, **options)
            if kind == "mortal rabbitmq":
                skip_without_own_server()
                server = stack.enter_context(RabbitServer.start(tmp_path / "server"))
                return lambda folder: MortalRabbit(server, folder, **options)
            kafka = request.getfixturevalue(kind)
            return lambda folder: LivingKafka(kafka, folder, **options)

        yield open_broker
