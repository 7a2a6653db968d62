from __future__ import annotations

import logging
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.address import Address
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    Channel,
    ConnectionThread,
    Refused,
    Reply,
)

UNREACHABLE = Address(host="127.0.0.1", port=1)


@pytest.mark.parametrize(
    ("level", "expected"), [(logging.NOTSET, logging.CRITICAL), (logging.DEBUG, logging.DEBUG)]
)
def test_pika_logs_are_silent_unless_level_is_set(level, expected):
    pika = logging.getLogger("pika")
    before = pika.level
    pika.setLevel(level)
    try:
        with pytest.raises(ProducerUnavailable, match="cannot be reached"):
            ConnectionThread(UNREACHABLE)
        assert pika.level == expected
    finally:
        pika.setLevel(before)


def test_connection_failure_is_logged_once(caplog):
    with pytest.raises(ProducerUnavailable) as raised:
        ConnectionThread(UNREACHABLE)

    assert str(raised.value).startswith("RabbitMQ at 127.0.0.1:1 cannot be reached: ")
    assert caplog.messages == []


def test_thread_has_ended_when_unreachable_is_reported(monkeypatch):
    started: list[Thread] = []
    start = Thread.start

    def record(thread: Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(Thread, "start", record)
    for _ in range(20):
        with pytest.raises(ProducerUnavailable, match="cannot be reached"):
            ConnectionThread(UNREACHABLE)

        assert [thread.name for thread in started if thread.is_alive()] == []

    assert len([thread for thread in started if thread.name == "rabbitmq"]) == 20


@pytest.mark.parametrize(
    ("reason", "kind", "error"),
    [
        (
            ChannelClosedByBroker(404, "NOT_FOUND - no queue"),
            Refused,
            "RabbitMQ refused: NOT_FOUND - no queue (404)",
        ),
        (
            ConnectionClosedByBroker(541, "INTERNAL_ERROR"),
            ProducerUnavailable,
            "RabbitMQ at 127.0.0.1:1 closed the connection: INTERNAL_ERROR (541)",
        ),
        (
            ConnectionClosedByBroker(320, "CONNECTION_FORCED"),
            ProducerUnavailable,
            "RabbitMQ at 127.0.0.1:1 closed the connection: CONNECTION_FORCED (320)",
        ),
    ],
)
def test_channel_closed_with_connection_is_lost_not_refused(reason, kind, error):
    # Given a channel whose answer is awaited
    connection: Any = SimpleNamespace(lost=None, address=UNREACHABLE)
    raw = MagicMock()
    channel, reply = Channel(connection, raw), Reply()
    channel.await_reply(reply)
    errors: list[ProducerError] = []
    channel.on_lost(errors.append)

    # When pika reports it closed, before the connection
    [[closed], _] = raw.add_on_close_callback.call_args
    closed(raw, reason)

    # Then the reply and the callback get the cause
    with pytest.raises(ProducerError) as raised:
        reply.wait(0)
    assert type(raised.value) is kind
    assert str(raised.value) == error
    assert errors == [raised.value] == [channel.lost]
