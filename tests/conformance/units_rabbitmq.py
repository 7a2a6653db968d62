"""The unit cases of the area ``rabbitmq``.

Broadway acknowledges on the channel that delivered, one message at a time.  Here a verdict is
carried out later and elsewhere, so a case's calls are read as verdicts: ``ack`` is ``ACK``, a
reject with requeue is a ``RETRY`` at once, and without a ``DEAD_LETTER``.  What a broker that
refuses, or a connection that breaks, does to them is tried at a real one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pika
import pytest

from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.custody.in_process import Tally
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import OptionsError, ProducerUnavailable
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import Qos, RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Backoff
from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.producers.rabbitmq.options import backoff_bounds
from airflow_broadway.testing.contract import settlement_of
from tests.conformance.observed import Case, logged
from tests.rabbitmq_fixtures import wanted_server
from tests.rabbitmq_place import Breaker, Place


@contextmanager
def own_place() -> Iterator[Place]:
    """A queue of the case's own at a real broker, which is never killed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(standing_queues, "_RELIABLE_AGE", 0.0),
    ):
        yield Place(wanted_server(), Path(folder))


def call_of(verdict: Verdict) -> list[Any]:
    """The call of Broadway's client that a verdict stands for."""
    if verdict.action is Action.ACK:
        return ["ack"]
    assert verdict.delay == 0
    return ["reject", {"requeue": verdict.action is Action.RETRY}]


def message(producer: RabbitMQProducer, *, redelivered: bool = False) -> Message:
    """A message that, if redelivered, failed before: what Broadway takes the broker's flag for, and
    what here its attempt says.
    """
    acknowledger = RunAcknowledger(producer, Tally())
    return Message(
        b"",
        attempt=2 if redelivered else 1,
        redelivered=redelivered,
        acknowledger=AckRef(acknowledger, "ref", Delivery()),
    )


def actions(case: Case) -> None:
    calls = []
    for action, redelivered in case["given"]["table"]:
        producer = RabbitMQProducer(queue="test", on_failure=action)
        failed = message(producer, redelivered=redelivered).failed("why")
        calls.append(call_of(producer.verdict(failed, failed=True, stage="process")))
    assert calls == case["expect"]["calls"]


def defaults(case: Case) -> None:
    expect = case["expect"]
    nowhere: dict[str, Any] = {"uri": "amqp://127.0.0.1:1", "reconnect_timeout": 0.1}
    producer = RabbitMQProducer(**case["given"]["options"], **nowhere)
    assert (producer.on_success, producer.on_failure) == (
        expect["on_success"],
        expect["on_failure"],
    )
    # As Broadway's: when the producer starts, which fails without a broker.
    with logged() as warnings, pytest.raises(ProducerUnavailable):
        producer.source(ProducerEnv())
    assert [text for text in warnings if expect["warning"].lstrip(":") in text]
    explicit = RabbitMQProducer(queue="test", **nowhere, on_failure="retry")
    with logged() as warnings, pytest.raises(ProducerUnavailable):
        explicit.source(ProducerEnv())
    assert warnings == []


def settings(case: Case) -> None:
    given, expect = case["given"], case["expect"]
    producer = RabbitMQProducer(
        queue="test", on_success=given["on_success"], on_failure=given["on_failure"]
    )
    calls = []
    for item, error in zip(given["messages"], expect["errors"], strict=True):
        message_ = message(producer)
        failed = item["outcome"] == "fail"
        try:
            message_ = message_.configure_ack(**item["configure"])
        except OptionsError:  # raised in handle_message: the message fails
            assert error is not None
            failed = True
        else:
            assert error is None
        if failed:
            message_ = message_.failed("why")
        calls.append(call_of(producer.verdict(message_, failed=failed, stage="process"))[0])
    assert calls == expect["calls"]


def refused_by_the_broker(case: Case) -> None:
    """Broadway acknowledges message by message, and each may be refused.

    Here an acknowledgement is a purge of the holding queue; what can be refused for one
    message alone is what a verdict publishes.  So the successes are dead-lettered, through an
    exchange without queue for those that fail in the case.  As in Broadway every one is
    tried, and the error is loud: settle-failed in the report.  Unlike there the failed list is
    settled all the same; in both, what was refused comes again.
    """
    given, expect = case["given"], case["expect"]
    with own_place() as place:
        exchange, sink = f"{place.name}-exchange", f"{place.name}-sink"
        place.declare()
        with place.channel() as channel:
            channel.exchange_declare(exchange, "headers")
            channel.queue_declare(sink)
            channel.queue_bind(sink, exchange, "", {"x-match": "all", "taken": True})
        for number in [*given["successful"], *given["failed"]]:
            taken = {"taken": number not in given["ack_error_on"]}
            place.send(b"%d" % number, properties=pika.BasicProperties(headers=taken))
        options: dict[str, Any] = {
            "on_success": "reject",
            "on_failure": "reject_and_requeue",
            "dead_letter": {"exchange": exchange},
        }
        producer = place.producer(**options)

        def verdict(number: int, made: Message) -> Verdict:
            failed = number in given["failed"]
            return producer.verdict(
                made.failed("why") if failed else made, failed=failed, stage="process"
            )

        with place.source("g1", **options) as source:
            messages = place.take(source)
            lease = source.lease
        numbers = {made.message_id: int(made.data) for made in messages}
        chosen = {made.message_id: verdict(numbers[made.message_id], made) for made in messages}
        custodian = producer.custodian(place.env("custodian"))
        report = custodian.settle(lease, settlement_of(messages, chosen))
        custodian.close()

        accepted = []
        while (got := place.get(sink)) is not None:
            accepted.append(int(got[1]))
        with place.source("g2", **options) as source:
            again = sorted(int(made.data) for made in place.take(source))
    tried = [n for n in given["successful"] if n in accepted or n in again]
    assert [["ack", number] for number in tried] == expect["calls"]
    assert set(accepted).isdisjoint(again)
    assert again == sorted([*given["ack_error_on"], *given["failed"]])
    assert report.failed == len(given["ack_error_on"])
    assert bool(report.errors) == expect["raises"]
    assert report.requeued == len(given["failed"])


def lost_channel(case: Case) -> None:
    """The connection breaks between a delivery and its being secured."""
    given, expect = case["given"], case["expect"]
    numbers = [body for body in given["deliver"] if body != "break_conn"]
    with own_place() as place, Breaker(place.server.address) as breaker:
        place.declare()
        options: dict[str, Any] = {
            "uri": f"amqp://127.0.0.1:{breaker.port}",
            "qos": Qos(prefetch_count=1),  # so that a consumer stands already when it breaks
            "backoff_min": 0.01,
        }
        place.send(b"before")
        with place.source("g1", **options) as source, logged() as warnings:
            [first] = source.secure(source.receive(1, timeout=5.0))
            # Answered after the acknowledgement of the first, which is not to be what breaks.
            cast(Any, source)._consumer.channel.call("basic_qos", prefetch_count=1)
            breaker.arm()
            place.send(*[b"%d" % number for number in numbers])
            messages: list[Message] = []
            while len(messages) < len(numbers):
                got = source.secure(source.receive(1, timeout=5.0))
                assert got, "a message is lost"
                messages += got
            lease = source.lease
        custodian = place.producer().custodian(place.env("custodian"))
        report = custodian.settle(lease, settlement_of([first, *messages], {}))
        custodian.close()
    assert breaker.broken == 1
    assert [int(made.data) for made in messages] == numbers
    # A delivery of the lost channel that was acknowledged would not have come again, marked.
    acks = [] if messages[0].redelivered else numbers[:1]
    assert acks == expect["acks"]
    assert (
        bool([text for text in warnings if text.startswith("the connection to RabbitMQ")])
        == (expect["error_logged"])
    )
    assert report == SettleReport(acked=1 + len(numbers))


def no_ack(case: Case) -> None:
    # A consumer without acknowledgements loses what a crash finds unhandled: refused, not offered.
    with pytest.raises(OptionsError, match="no_ack would lose messages"):
        RabbitMQProducer(queue="test", **case["given"])


def exponential(case: Case) -> None:
    given, expect = case["given"], case["expect"]
    backoff = Backoff(given["type"], given["min"] / 1000, given["max"] / 1000)
    draws = [round(1000 * (backoff.next() or 0)) for _ in range(given["draws"])]
    assert draws == expect["delays"]
    backoff.reset()
    assert round(1000 * (backoff.next() or 0)) == expect["after_reset"]


def partial_bounds(case: Case) -> None:
    for given, wanted in zip(case["given"]["options"], case["expect"]["bounds"], strict=True):
        low, high = given.get("min"), given.get("max")
        bounds = backoff_bounds(low and low / 1000, high and high / 1000)
        assert [round(1000 * delay) for delay in bounds] == wanted
    with pytest.raises(OptionsError, match="backoff_min"):
        backoff_bounds(1.0, 0.5)
    assert Backoff("stop", *backoff_bounds(None, None)).next() is None


RABBITMQ: dict[str, Callable[[Case], None]] = {
    "rmq-001": actions,
    "rmq-002": defaults,
    "rmq-003": settings,
    "rmq-004": refused_by_the_broker,
    "rmq-005": no_ack,
    "rmq-007": exponential,
    "rmq-008": partial_bounds,
    "rmq-012": lost_channel,
}
