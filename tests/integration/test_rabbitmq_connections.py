"""Connections to a real RabbitMQ that break, and what consumers on them are told and given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pika
import pytest

from airflow_broadway.core.acknowledger import RunAcknowledger
from airflow_broadway.core.custody import (
    RELEASE,
    Action,
    Settlement,
    SettleReport,
    Source,
    Verdict,
)
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.message import AckRef, Message
from airflow_broadway.core.settler import Tally
from airflow_broadway.producers.rabbitmq import Qos, topology
from airflow_broadway.producers.rabbitmq.metadata import NAMES
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


def test_a_returned_bundle_whose_acknowledgement_is_cut_off_is_handled_once(place: Place) -> None:
    # Given messages that an earlier run gave back, and no lease queue declared ahead
    place.declare()
    place.send(b"1", b"2", b"3")
    with place.source("g0") as source:
        assert len(place.take(source)) == 3
        lease = source.lease
    custodian = place.producer().custodian(place.env("custodian"))
    assert custodian.settle(lease, Settlement(rest=RELEASE)).released == 3
    custodian.close()
    with place.channel() as channel:
        channel.queue_delete(place.queues.spares)

    # When the connection breaks as the bundle is acknowledged: it is secured by then
    with Breaker(place.server.address) as breaker:
        with place.source(**through(breaker)) as source:
            breaker.arm(BASIC_ACK)
            messages = place.take(source)
            lease = source.lease
        assert breaker.broken == 1

    # Then it is recognised when it is delivered again, and the run's sum is right
    custodian = place.producer().custodian(place.env("custodian"))
    report = custodian.settle(lease, settlement_of(messages))
    custodian.close()
    assert sorted(message.data for message in messages) == [b"1", b"2", b"3"]
    assert report == SettleReport(acked=3)
    assert place.settle("g2")[0] == []


# -- consumers -------------------------------------------------------------------------------------


def test_a_consumer_that_the_broker_cancels_is_one_clear_error(place: Place) -> None:
    place.declare()
    place.send(b"1")

    with place.source(qos=Qos(prefetch_count=1), on_failure="retry") as source:
        assert one(source).data == b"1"
        delete(place)
        told = rf"{place.name}.*NOT_FOUND.*create it, or let the option `declare` do so"
        with pytest.raises(ProducerError, match=told):
            source.receive(1, timeout=5.0)


def test_a_queue_that_was_deleted_is_declared_anew_where_the_option_says_so(place: Place) -> None:
    options: dict[str, Any] = {"qos": Qos(prefetch_count=1), "declare": {"durable": True}}
    place.declare()
    place.send(b"1")

    with place.source(**options, on_failure="retry", backoff_min=0.01) as source:
        assert one(source).data == b"1"
        delete(place)
        assert source.receive(1, timeout=1.0) == []
        place.send(b"2")
        assert one(source).data == b"2"


def delete(place: Place) -> None:
    with place.channel() as channel:
        channel.queue_delete(place.name)


def test_consume_options_reach_the_broker_and_an_exclusive_consumer_stays_alone(
    place: Place,
) -> None:
    # Given a run that consumes exclusively
    place.declare()
    place.send(b"1")
    options: dict[str, Any] = {
        "consume_options": {"exclusive": True, "arguments": {"x-priority": 5}},
        "qos": Qos(prefetch_count=1),
        "on_failure": "retry",
    }
    with place.source("g1", **options) as source:
        assert one(source).data == b"1"
        place.send(b"2")

        # When another run comes to the same queue, it is told why it gets nothing
        with place.source("g2", **options) as other:
            told = "in exclusive use; another consumer has it for itself"
            with pytest.raises(ProducerError, match=told):
                other.receive(1, timeout=2.0)

        # Then the first goes on
        assert one(source).data == b"2"


def test_metadata_holds_every_field_that_is_asked_for(place: Place) -> None:
    given: dict[str, Any] = {
        "content_type": "text/plain",
        "content_encoding": "identity",
        "headers": {"h": 1},
        "priority": 4,
        "correlation_id": "c",
        "reply_to": "r",
        "message_id": "m",
        "timestamp": 1_700_000_000,
        "type": "t",
        "user_id": "guest",
        "app_id": "a",
        "cluster_id": "k",
    }
    place.declare()
    place.send(b"1", properties=pika.BasicProperties(delivery_mode=2, **given))

    [message], _ = place.settle("g1", metadata=list(NAMES))

    assert dict(message.metadata) == {
        **given,
        "persistent": True,
        "redelivered": False,
        "exchange": "",
        "routing_key": place.name,
    }


def test_each_message_may_have_its_own_way_of_being_settled(place: Place) -> None:
    """Broadway's four values, given by ``configure_ack``, at a broker."""
    place.declare()
    place.send(b"ack", b"reject", b"reject_and_requeue", b"reject_and_requeue_once")
    producer = place.producer(on_failure="retry")

    def verdicts(messages: list[Message]) -> dict[str, Verdict]:
        made = {}
        for message in messages:
            ref = AckRef(RunAcknowledger(producer, Tally()), "g", message.acknowledger.data)
            own = Message(message.data, redelivered=message.redelivered, acknowledger=ref)
            failed = own.configure_ack(on_failure=message.data.decode()).failed("why")
            made[message.message_id] = producer.verdict(failed, failed=True, stage="process")
        return made

    def run(generation: str) -> SettleReport:
        with place.source(generation, on_failure="retry") as source:
            messages = place.take(source)
            lease = source.lease
        custodian = producer.custodian(place.env("custodian"))
        report = custodian.settle(lease, settlement_of(messages, verdicts(messages)))
        custodian.close()
        return report

    # What is redelivered is requeued no more than once, but always if that was said.
    assert run("g1") == SettleReport(acked=1, dead_lettered=1, requeued=2)
    assert run("g2") == SettleReport(dead_lettered=1, requeued=1)
    assert [message.data for message in place.settle("g3")[0]] == [b"reject_and_requeue"]
