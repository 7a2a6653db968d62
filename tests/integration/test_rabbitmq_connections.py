"""Connections to a real RabbitMQ that break, are blocked, or are secured by TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pika
import pytest

from airflow_broadway.core.custody import Action, SettleReport, Source, Verdict
from airflow_broadway.core.message import Message
from airflow_broadway.producers.rabbitmq import Qos, topology
from airflow_broadway.producers.rabbitmq.properties import MARK
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_fixtures import wanted_server
from tests.rabbitmq_place import Breaker, Place

pytestmark = pytest.mark.broker

#: Class and method of ``basic.ack``, as they stand in its frame.
BASIC_ACK = b"\x00\x3c\x00\x50"
RETRY = Verdict(Action.RETRY, 0.0, "again", "process")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    # Nobody kills this broker: the first lease queue of a test may be used at once.
    monkeypatch.setattr(topology, "_SETTLED", 0.0)
    return Place(wanted_server(), tmp_path)


def through(breaker: Breaker) -> dict[str, Any]:
    """Options by which a consumer already stands when its connection breaks."""
    return {
        "uri": f"amqp://127.0.0.1:{breaker.port}",
        "qos": Qos(prefetch_count=1),
        "backoff_min": 0.01,
        "on_failure": "retry",
    }


def one(source: Source) -> Message:
    [message] = source.secure(source.receive(1, timeout=5.0))
    return message


def test_messages_keep_ids_of_their_own_when_the_connection_breaks_between_them(
    place: Place,
) -> None:
    # Given a run that receives one message before its connection breaks, and one after
    place.declare()
    place.send(b"before")
    with Breaker(place.server.address) as breaker:
        with place.source(**through(breaker)) as source:
            before = one(source)
            synchronise(source)
            breaker.arm()
            place.send(b"after")
            after = one(source)
            lease = source.lease
        assert breaker.broken == 1

    # When one succeeds and the other is to be retried
    custodian = place.producer().custodian(place.env("custodian"))
    settlement = settlement_of([before, after], {after.message_id: RETRY})
    report = custodian.settle(lease, settlement)
    custodian.close()

    # Then each gets its own verdict
    assert before.message_id != after.message_id
    assert report == SettleReport(acked=1, requeued=1)
    assert [message.data for message in place.settle("g2")[0]] == [b"after"]


def synchronise(source: Any) -> None:
    """Wait until the broker has all that the source said so far."""
    source._intake.channel.call("basic_qos", prefetch_count=1)


def test_a_retry_whose_acknowledgement_is_cut_off_is_handled_once(place: Place) -> None:
    # Given a run, and a message on its second attempt
    place.declare()
    place.send(b"first")
    mark = {MARK: {"id": "its-own", "giver": "g0", "attempt": 2}}
    with Breaker(place.server.address) as breaker:
        with place.source(**through(breaker)) as source:
            first = one(source)
            synchronise(source)

            # When the connection breaks as the message is acknowledged: it is secured by then
            breaker.arm(BASIC_ACK)
            place.send(b"second", properties=pika.BasicProperties(headers=mark))
            second = one(source)
            place.send(b"third")
            third = one(source)
            lease = source.lease
        assert breaker.broken == 1

    # Then it is recognised when it is delivered again, and the run's sum is right
    messages = [first, second, third]
    custodian = place.producer().custodian(place.env("custodian"))
    report = custodian.settle(lease, settlement_of(messages))
    custodian.close()
    assert [message.data for message in messages] == [b"first", b"second", b"third"]
    assert (second.message_id, second.attempt) == ("its-own", 2)
    assert report == SettleReport(acked=3)
    assert place.settle("g2")[0] == []
