"""Refusals, mismatches and hostile messages at a real RabbitMQ."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

import pika
import pytest

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq import Qos
from airflow_broadway.producers.rabbitmq.amqp.properties import decode
from airflow_broadway.producers.rabbitmq.marks import MARK
from airflow_broadway.testing.contract import entry_of
from tests.rabbitmq_place import permitted
from tests.waiting import eventually

pytestmark = pytest.mark.broker


# -- messages ----------------------------------------------------------------------------------


def test_an_oversized_body_is_dead_lettered_and_reported(place, caplog):
    place.send(b"1" * 1_000, b"x" * 1_001, b"2", b"y" * 6_000)
    caplog.set_level(logging.ERROR)

    messages, report = place.settle("g1", max_message_bytes=1_000)

    assert [message.data for message in messages] == [b"1" * 1_000, b"2"]
    text = "dead letters, unprocessed, next to those received: 2 (too large)"
    assert report == SettleReport(acked=2, errors=(text,))
    dead_letter = place.first(place.queues.dead)
    assert dead_letter[1] == b"x" * 1_001
    assert "max_message_bytes" in dead_letter[0].headers["x-broadway-reason"]
    mark = dead_letter[0].headers[MARK]["id"]
    assert f"Message {mark} is a dead letter, unprocessed: its body has 1001 bytes" in caplog.text


def test_a_bundle_in_the_source_queue_is_dead_lettered_unchanged(place):
    # Given a bundle of two messages of a dead run, moved by an operator
    place.send(b"1", b"2")
    place.hold("dead", lease=3.0)
    queue = place.queues.held(0)
    opening, (_, bundle) = place.first(queue), place.first(queue)
    assert opening
    place.send(b"AFBW is no bundle", bundle, b"3")

    messages, report = place.settle("g1")

    assert [message.data for message in messages] == [b"AFBW is no bundle", b"3"]
    text = "1 (bundles: move them back into their holding queue)"
    assert report == SettleReport(
        acked=2, errors=(f"dead letters, unprocessed, next to those received: {text}",)
    )
    properties, body = place.first(place.queues.dead)
    reason = f"it is a bundle of 2 messages from the queue {place.name!r}: move it back into its"
    assert properties.headers["x-broadway-reason"].startswith(reason)
    with place.channel() as channel:
        channel.basic_publish("", queue, body)
    time.sleep(3)
    assert [message.data for message in place.hold("g2")[0]] == [b"1", b"2"]


# -- queues ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"x-stream-offset": "first"}])
def test_a_stream_is_refused(undeclared, arguments):
    undeclared.declare(**{"x-queue-type": "stream"})
    undeclared.send(b"1", b"2", b"3")
    options: dict[str, Any] = {"consume_options": {"arguments": arguments}}

    # A user with exactly the permissions of the guide
    with permitted(undeclared.server, configure="^broadway") as user:
        producer = undeclared.producer(uri=None, conn_id="rabbit", **options)
        stream = producer.source(undeclared.env(**user))
        try:
            with pytest.raises(ProducerError, match=r"is a stream: .* use a classic or quorum"):
                stream.receive(10, timeout=0.0)
        finally:
            stream.close()


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_other_queue_types_are_not_taken_for_streams(undeclared, kind):
    undeclared.declare(**{"x-queue-type": kind})

    assert undeclared.settle("g1")[0] == []
    undeclared.send(b"1")
    [message] = undeclared.settle("g2")[0]
    assert not message.redelivered


def test_a_priority_queue_delivers_urgent_messages_first(undeclared):
    undeclared.declare(**{"x-max-priority": 5})
    for priority in (1, 5, 3):
        undeclared.send(str(priority).encode(), properties=pika.BasicProperties(priority=priority))

    messages, _ = undeclared.settle("g1", metadata=["priority"])

    assert [message.metadata["priority"] for message in messages] == [5, 3, 1]


def test_options_declare_bind_and_connect(undeclared):
    exchange = f"{undeclared.name}-exchange"
    seen: list[int] = []

    def after_connect(channel: Any) -> None:
        seen.append(channel.number)
        channel.call("exchange_declare", exchange=exchange, exchange_type="topic")

    options: dict[str, Any] = {
        "declare": {"durable": True},
        "bindings": [(exchange, {"routing_key": "flights.#"})],
        "after_connect": after_connect,
        "consume_options": {"consumer_tag": "mine"},
        "qos": Qos(prefetch_count=7),
        "metadata": ["exchange", "routing_key"],
    }
    with undeclared.source("g0", **options) as source:
        assert source.receive(10, timeout=0.1) == []
    with undeclared.channel() as channel:
        channel.basic_publish(exchange, "flights.late", b"late")

    [message], _ = undeclared.settle("g1", **options)

    assert dict(message.metadata) == {"exchange": exchange, "routing_key": "flights.late"}
    assert len(seen) >= 2


def test_after_connect_may_refuse(place):
    with pytest.raises(ProducerError, match="it returned 'no'"):
        place.producer(after_connect=lambda channel: "no").source(place.env())


def test_an_empty_run_declares_nothing(place):
    place.settle("g1")

    assert place.depth(place.queues.held(0)) is None


def test_the_depth_counts_ready_delayed_and_dead(place):
    place.send(*[b"%d" % number for number in range(6)])
    late = Verdict(Action.RETRY, 300.0, "later", "process")
    dead = Verdict(Action.DEAD_LETTER, 0.0, "why", "process")

    place.settle("g1", {0: late, 1: late, 2: dead})
    place.send(b"new")

    assert place.producer().depth(place.env()) == QueueDepth(1, 2, 0, 1, None)


def test_immediately_settled_messages_are_not_redelivered_after_a_crash(place):
    place.send(b"1", b"2", b"3")
    messages, lease = place.hold("g1", lease=5.0)
    custodian = place.producer(lease=5.0).custodian(place.env("g1"))
    report = custodian.settle_now(lease, [entry_of(messages[1], ACK)])
    assert custodian.settle_now(lease, [entry_of(messages[1], ACK)]) == report
    custodian.close()

    # When the run dies, and its lease lapses
    redelivered: list[bytes] = []

    def receive_both() -> bool:
        redelivered.extend(message.data for message in place.settle(uuid.uuid4().hex)[0])
        return len(redelivered) >= 2

    eventually(receive_both)
    assert sorted(redelivered) == [b"1", b"3"]


def test_settled_headers_are_minimal(place):
    place.send(b"1", properties=pika.BasicProperties(delivery_mode=2))
    retry = Verdict(Action.RETRY, 0.0, "again", "process")
    place.settle("g1", {0: retry})

    retried = place.first(place.name)
    assert set(retried[0].headers) == {MARK}
    assert decode(b"\x00\x00") == {}
