"""Brokers with narrow limits, and slow callbacks."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import Qos
from airflow_broadway.producers.rabbitmq.receive import consumer
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_fixtures import skip_without_own_server, wanted_server
from tests.waiting import eventually

pytestmark = pytest.mark.broker

#: The defaults of RabbitMQ 3.10.
MAX_SIZE, TIMEOUT, TICK = 134_217_728, 1_800_000, 60_000


# -- slow callbacks --------------------------------------------------------------------------------


def test_no_message_is_unacknowledged_during_slow_callbacks(place, monkeypatch):
    monkeypatch.setattr(consumer, "DEMAND_TIMEOUT", 0.3)
    place.send(*[b"%d" % number for number in range(100)])
    with place.source(qos=Qos(prefetch_count=20)) as source:
        # Given a run whose broker has sent more than its demand
        messages = [*source.receive(20, timeout=5.0)]
        messages += source.receive(20, timeout=5.0)
        count = len(messages)

        # When its callbacks take longer than the broker should wait
        eventually(lambda: place.count(place.name) >= 100 - count)

        # Then the surplus is back in the queue, and the run receives no more than its demand
        while len(messages) < 100:
            received = source.receive(20, timeout=5.0)
            messages += received
            assert received
            unacknowledged = 100 - len(messages) - place.count(place.name)
            assert unacknowledged <= 20 - len(received)  # the rest of the demand is in flight
        messages += source.stop()
        lease = source.lease
    assert sorted(int(message.data) for message in messages) == list(range(100))
    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=100)


@pytest.mark.slow
def test_the_consumer_timeout_ends_no_run(place, monkeypatch, caplog):
    skip_without_own_server()
    monkeypatch.setattr(
        consumer, "DEMAND_TIMEOUT", 3600.0
    )  # as if this broker's timeout were shorter than ours
    caplog.set_level(logging.WARNING)
    place.send(*[b"%d" % number for number in range(100)])
    with (
        place.server.setting(consumer_timeout=(2_000, TIMEOUT), channel_tick_interval=(500, TICK)),
        place.source(qos=Qos(prefetch_count=20), backoff_min=0.01) as source,
    ):
        messages: list[Message] = []
        for _ in range(2):
            messages += source.receive(20, timeout=5.0)
        time.sleep(5.0)
        while len(messages) < 100:
            received = source.receive(20, timeout=5.0)
            assert received
            messages += received
        lease = source.lease
    assert "delivery acknowledgement" in caplog.text
    assert sorted(int(message.data) for message in messages) == list(range(100))
    assert place.carry_out(lease, settlement_of(messages)).acked == 100


# -- short of memory -------------------------------------------------------------------------------


@pytest.mark.slow
def test_stopping_on_a_blocked_connection_waits_for_pending_confirms(place):
    # Given a source whose connection waits a second for confirms, and a broker short of memory
    skip_without_own_server()
    place.send(*[b"%d" % number for number in range(10)])
    uri = f"amqp://{place.host}:{place.port}?connection_timeout=1"
    with place.source(uri=uri, on_failure="retry") as source:
        messages = [*source.receive(5, timeout=5.0)]
        inner: Any = source
        place.server.control("set_vm_memory_high_watermark", "absolute", "1MB")
        try:
            # When it stops with messages in flight, and memory is free only after that second
            inner._buffer.demand(5)
            inner._connection.post(lambda: inner._consumer.want(5))
            eventually(lambda: inner._connection.blocked)
            recovery = threading.Timer(
                2.5, place.server.control, ("set_vm_memory_high_watermark", "absolute", "3GB")
            )
            recovery.start()
            messages += source.stop()
            recovery.join()
        finally:
            place.server.control("set_vm_memory_high_watermark", "absolute", "3GB")
        lease = source.lease

    # Then it has the messages, and its lease counts no extra bundle
    assert sorted(int(message.data) for message in messages) == list(range(10))
    assert not lease.state["extra"]
    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=10)


# -- small messages --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow():
    """Yields a server that rejects messages of more than 200,000 bytes."""
    skip_without_own_server()
    server = wanted_server()
    with server.setting(max_message_size=(200_000, MAX_SIZE)):
        yield server


@pytest.mark.usefixtures("narrow")
def test_bundles_respect_the_brokers_size_limit(place):
    # Given more bytes than the broker accepts in one message, and one too large for any bundle
    bodies = [b"%03d" % number + b"x" * 10_000 for number in range(60)]
    place.send(*bodies, b"y" * 199_990)

    # When a run drains a queue whose limit is unknown to it
    with (
        place.source("g0") as source,
        pytest.raises(ProducerError, match="set the option max_message_bytes"),
    ):
        place.take(source)

    # And when the limit is set
    messages, report = place.settle("g1", max_message_bytes=190_000)

    # Then it handles all that fit a bundle, and dead-letters the other with the remedy
    assert sorted(message.data for message in messages) == bodies
    assert (report.acked, report.total) == (60, 60)
    assert "next to those received: 1 (too large)" in report.errors[0]
    dead = place.first(place.queues.dead)
    assert dead[1] == b"y" * 199_990
    assert "max_message_bytes" in dead[0].headers["x-broadway-reason"]
