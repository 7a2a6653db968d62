"""Connections to a real RabbitMQ that break, and the errors and messages of their consumers."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pika
import pytest

from airflow_broadway.core.custody.protocol import Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import Qos, RabbitMQProducer
from airflow_broadway.producers.rabbitmq.options import METADATA_FIELDS
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_place import Breaker, Place, manage, marked
from tests.rabbitmq_server import free_port
from tests.waiting import eventually

pytestmark = pytest.mark.broker

#: Class and method ids of ``basic.ack``, as in its frame.
BASIC_ACK = b"\x00\x3c\x00\x50"
#: The same of ``basic.consume`` and ``queue.declare``.
BASIC_CONSUME, QUEUE_DECLARE = b"\x00\x3c\x00\x14", b"\x00\x32\x00\x0a"
RETRY = Verdict(Action.RETRY, 0.0, "again", "process")


def breaker_options(breaker: Breaker) -> dict[str, Any]:
    """Returns options for a consumer that is open before its connection breaks."""
    return {
        "uri": f"amqp://127.0.0.1:{breaker.port}",
        "qos": Qos(prefetch_count=1),
        "backoff_min": 0.01,
        "on_failure": "retry",
    }


def receive_one(source: Source) -> Message:
    [message] = source.secure(source.receive(1, timeout=5.0))
    return message


def test_generated_ids_stay_unique_after_a_reconnect(place):
    # Given a run that receives one message before its connection breaks, and one after
    place.send(b"before")
    with Breaker(place.server.address) as breaker:
        with place.source(**breaker_options(breaker)) as source:
            before = receive_one(source)
            synchronise(source)
            breaker.arm()
            place.send(b"after")
            after = receive_one(source)
            lease = source.lease
        assert breaker.broken == 1

    # When one succeeds and the other is to be retried
    settlement = settlement_of([before, after], {after.message_id: RETRY})
    report = place.carry_out(lease, settlement)

    # Then each is settled by its own verdict
    assert before.message_id != after.message_id
    assert report == SettleReport(acked=1, requeued=1)
    assert [message.data for message in place.settle("g2")[0]] == [b"after"]


def synchronise(source: Any) -> None:
    """Waits until the broker has processed all frames of the source."""
    source._consumer.channel.call("basic_qos", prefetch_count=1)


def test_a_retry_with_a_lost_ack_is_handled_once(place):
    # Given a run, and a message on its second attempt
    place.send(b"first")
    mark = marked(b"second", "its-own", attempt=2)
    with Breaker(place.server.address) as breaker:
        with place.source(**breaker_options(breaker)) as source:
            first = receive_one(source)
            synchronise(source)

            # When the connection breaks at the ack of the message, which is already secured
            breaker.arm(BASIC_ACK)
            place.send(b"second", properties=pika.BasicProperties(headers=mark))
            second = receive_one(source)
            place.send(b"third")
            messages = [first, second, *place.take(source)]
            lease = source.lease
        assert breaker.broken == 1

    # Then it is handled once, marked as redelivered
    assert [message.data for message in messages] == [b"first", b"second", b"third"]
    assert (second.message_id, second.attempt, second.redelivered) == ("its-own", 2, True)
    report = place.carry_out(lease, settlement_of(messages))
    assert report == SettleReport(acked=3)
    assert place.settle("g2")[0] == []


def test_a_run_killed_between_confirm_and_ack_leaves_marked_copies(place):
    # Given a run whose bundle is confirmed, and whose acks never reach the broker
    place.send(b"one")
    with Breaker(place.server.address) as breaker:
        with place.source(**breaker_options(breaker)) as source:
            breaker.arm(BASIC_ACK, times=math.inf)
            # Then it handles none of its messages, since copies of them exist
            assert source.secure(source.receive(1, timeout=1.0)) == []
            lease = source.lease
        assert breaker.broken >= 1

    # When the next run receives the dead run's messages and those in the queue
    place.carry_out(lease, Settlement(rest=RELEASE))
    copies, _ = place.hold("g2")

    # Then all copies are received, each with its own id, and marked as redelivered
    assert {message.data for message in copies} == {b"one"}
    assert {message.redelivered for message in copies} == {True}
    ids = {message.message_id for message in copies}
    assert len(ids) == len(copies) >= 2


def test_a_run_waits_for_a_starting_broker(place, caplog):
    place.send(b"1")
    port = free_port()
    breakers: list[Breaker] = []
    timer = threading.Timer(1.0, lambda: breakers.append(Breaker(place.server.address, port=port)))
    timer.start()

    with place.source(
        uri=f"amqp://127.0.0.1:{port}", backoff_min=0.2, backoff_max=0.3, on_failure="retry"
    ) as source:
        assert receive_one(source).data == b"1"

    assert "cannot be reached" in caplog.text
    assert "trying again in" in caplog.text
    [breaker] = breakers
    with breaker:
        pass


def test_failures_after_connecting_are_retried(place):
    place.send(b"1")
    calls: list[Any] = []

    def unready(channel: Any) -> None:
        calls.append(channel)
        if len(calls) < 3:
            raise LookupError("the exchange is not there yet")

    options: dict[str, Any] = {"after_connect": unready, "on_failure": "retry", "backoff_min": 0.01}
    with place.source(**options, backoff_max=0.02) as source:
        assert receive_one(source).data == b"1"
    assert len(calls) == 3

    calls.clear()
    text = "after_connect raised LookupError: the exchange is not there yet"
    with pytest.raises(ProducerUnavailable, match=text):
        place.producer(**options, backoff_type="stop").source(place.env())
    assert len(calls) == 1


def retrying(breaker: Breaker, **options: Any) -> dict[str, Any]:
    """Returns options of a run that connects every tenth of a second, for a second."""
    delays = {"backoff_min": 0.1, "backoff_max": 0.1, "reconnect_timeout": 1.0}
    return {"uri": breaker.uri, "on_failure": "retry", **delays, **options}


def test_connections_that_fail_at_first_use_back_off_and_time_out(place):
    place.send(b"1")
    with Breaker(place.server.address) as breaker, place.source(**retrying(breaker)) as source:
        breaker.arm(BASIC_CONSUME, times=math.inf)
        began = time.monotonic()
        with pytest.raises(ProducerUnavailable, match="is lost"):
            source.receive(1, timeout=60.0)
        assert 0.8 < time.monotonic() - began < 10.0
        assert 3 <= breaker.broken <= 12

    assert [message.data for message in place.settle("g2")[0]] == [b"1"]


def test_a_stopped_run_does_not_wait_for_its_broker(place):
    place.send(b"1", b"2")
    stop = threading.Event()
    with Breaker(place.server.address) as breaker:
        slow = {"backoff_min": 30.0, "backoff_max": 30.0, "reconnect_timeout": 600.0}
        options = retrying(breaker, qos=Qos(prefetch_count=1), **slow)
        env = replace(place.env(), stopping=stop.is_set)
        source = place.producer(**options).source(env)
        first = receive_one(source)
        synchronise(source)
        breaker.arm(times=math.inf)
        threading.Timer(0.5, stop.set).start()

        assert source.receive(1, timeout=60.0) == []
        assert stop.is_set()
        assert source.stop() == []
        lease = source.lease
        source.close()

    # Then its received message is settled, and the other stays in the queue
    assert place.carry_out(lease, settlement_of([first])) == SettleReport(acked=1)
    assert [message.data for message in place.settle("g2")[0]] == [b"2"]


def test_settlement_survives_repeated_connection_losses(place):
    place.send(b"1")
    messages, lease = place.hold()
    with Breaker(place.server.address) as breaker:
        custodian = place.producer(**retrying(breaker)).custodian(place.env("custodian"))
        breaker.arm(QUEUE_DECLARE, times=math.inf)
        with pytest.raises(ProducerUnavailable, match="is lost"):
            custodian.settle(lease, settlement_of(messages))
        custodian.close()
        assert 2 <= breaker.broken <= 12

        breaker.arm(QUEUE_DECLARE, times=5)
        patient = retrying(breaker, reconnect_timeout=60.0)
        custodian = place.producer(**patient).custodian(place.env("custodian"))
        assert custodian.settle(lease, settlement_of(messages)) == SettleReport(acked=1)
        custodian.close()


# -- consumers -------------------------------------------------------------------------------------


def test_a_run_survives_connections_closed_at_the_broker(place):
    # Given a run that has received a message
    place.send(b"1", b"2", b"3")
    with place.source(qos=Qos(prefetch_count=1), backoff_min=0.01) as source:
        first = receive_one(source)
        synchronise(source)

        # When the broker closes its connection with 320, CONNECTION_FORCED
        connection = source._connection

        def closed() -> bool:
            for attributes in manage(place.server, "GET", "connections"):
                manage(place.server, "DELETE", f"connections/{quote(attributes['name'])}")
            return connection.lost is not None

        eventually(closed)
        messages = [first, *place.take(source)]
        lease = source.lease
    assert "(320)" in str(connection.lost)
    report = place.carry_out(lease, settlement_of(messages))

    # Then it continues on a new connection
    assert sorted(message.data for message in messages) == [b"1", b"2", b"3"]
    assert report == SettleReport(acked=3)


@pytest.mark.parametrize("at", ["claim", "bind", "opening bundle"])
def test_a_connection_lost_while_opening_a_holding_queue_is_replaced(place, at):
    place.send(b"1")
    frames = {"claim": b".claim", "bind": b"\x00\x32\x00\x14", "opening bundle": b"AFBW"}

    with Breaker(place.server.address) as breaker:
        breaker.arm(frames[at])
        with place.source(**breaker_options(breaker)) as source:
            messages = place.take(source)
            lease = source.lease
        assert breaker.broken == 1

    assert [message.data for message in messages] == [b"1"]
    assert lease.state["holding_queue"] == place.queues.held(0)
    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)
    assert place.count(place.name, place.queues.held(0)) == 0


def test_a_cancelled_consumer_is_one_clear_error(place):
    place.send(b"1")

    with place.source(qos=Qos(prefetch_count=1), on_failure="retry") as source:
        assert receive_one(source).data == b"1"
        delete_queue(place)
        text = rf"{place.name}.*NOT_FOUND.*create it, or let the option `declare` do so"
        with pytest.raises(ProducerError, match=text):
            source.receive(1, timeout=5.0)


def test_a_deleted_queue_is_redeclared_if_configured(place):
    options: dict[str, Any] = {"qos": Qos(prefetch_count=1), "declare": {"durable": True}}
    place.send(b"1")

    with place.source(**options, on_failure="retry", backoff_min=0.01) as source:
        assert receive_one(source).data == b"1"
        delete_queue(place)

        def declared() -> bool:
            assert source.receive(1, timeout=0.5) == []
            return place.depth(place.name) is not None

        eventually(declared)
        place.send(b"2")
        assert receive_one(source).data == b"2"


def delete_queue(place: Place) -> None:
    with place.channel() as channel:
        channel.queue_delete(place.name)


def test_consume_options_reach_the_broker_and_exclude_other_consumers(place):
    # Given a run that consumes exclusively
    place.send(b"1")
    options: dict[str, Any] = {
        "consume_options": {"exclusive": True, "arguments": {"x-priority": 5}},
        "qos": Qos(prefetch_count=1),
        "on_failure": "retry",
    }
    with place.source("g1", **options) as source:
        assert receive_one(source).data == b"1"
        place.send(b"2")

        # When another run opens the same queue, its error has the reason
        with place.source("g2", **options) as second:
            reason = "in exclusive use; another consumer has it for itself"
            with pytest.raises(ProducerError, match=reason):
                second.receive(1, timeout=2.0)

        # Then the first continues
        assert receive_one(source).data == b"2"


def test_metadata_has_every_requested_field(place):
    properties: dict[str, Any] = {
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
    place.send(b"1", properties=pika.BasicProperties(delivery_mode=2, **properties))

    [message], _ = place.settle("g1", metadata=list(METADATA_FIELDS))

    assert dict(message.metadata) == {
        **properties,
        "persistent": True,
        "redelivered": False,
        "exchange": "",
        "routing_key": place.name,
    }


# -- set-up ----------------------------------------------------------------------------------------


def test_a_binding_without_key_uses_the_empty_key(undeclared):
    exchange = f"exchange-{undeclared.name}"
    with undeclared.channel() as channel:
        channel.exchange_declare(exchange, exchange_type="direct", auto_delete=True)
    options: dict[str, Any] = {
        "declare": {"durable": True},
        "bindings": [(exchange, {})],
        "on_failure": "retry",
    }
    with undeclared.source("g0", **options):
        pass

    with undeclared.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish(exchange, "", b"by no key", mandatory=True)
        with pytest.raises(pika.exceptions.UnroutableError):
            channel.basic_publish(exchange, undeclared.name, b"by the queue's name", mandatory=True)

    assert [message.data for message in undeclared.settle("g1", **options)[0]] == [b"by no key"]


# -- hosts -----------------------------------------------------------------------------------------


def test_the_first_reachable_host_is_used_with_failover(place):
    # Given a run on the second of three hosts, since the first is unreachable
    place.send(b"before")
    with Breaker(place.server.address) as breaker:
        hosts = f"127.0.0.1:1,127.0.0.1:{breaker.port},{place.host}:{place.port}"
        options = {**breaker_options(breaker), "uri": f"amqp://{hosts}"}
        with place.source(**options) as source:
            before = receive_one(source)
            synchronise(source)

            # When the second becomes unreachable too
            breaker.arm(BASIC_ACK)
            breaker.close()
            place.send(b"after")
            after = receive_one(source)
            lease = source.lease
    assert breaker.broken == 1

    # Then the run continues on the third, and is settled there
    assert place.carry_out(lease, settlement_of([before, after])) == SettleReport(acked=2)


def test_unreachable_hosts_are_all_named(undeclared):
    producer = undeclared.producer(uri="amqp://127.0.0.1:1,127.0.0.1:2", backoff_type="stop")

    with pytest.raises(
        ProducerUnavailable,
        match=r"127\.0\.0\.1:1 cannot be reached.*; RabbitMQ at 127\.0\.0\.1:2 cannot be reached",
    ):
        producer.source(undeclared.env())


def test_connection_tuning_and_client_properties_are_applied(place):
    extra = {"frame_max": 4096, "channel_max": 16, "client_properties": {"team": "shop"}}
    env = place.env(extra=extra)
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit", on_failure="retry")
    bodies = [bytes([number]) * 20_000 for number in range(50)]
    place.send(*bodies)

    source: Any = producer.source(env)
    messages = place.take(source)
    parameters = source._connection.raw.params
    report = producer.custodian(env).settle(source.lease, settlement_of(messages))
    source.close()

    assert (parameters.frame_max, parameters.channel_max) == (4096, 16)
    assert parameters.client_properties["team"] == "shop"
    assert [message.data for message in messages] == bodies
    assert report == SettleReport(acked=50)
