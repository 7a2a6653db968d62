"""The unit cases of the area ``rabbitmq``.

Broadway acknowledges single messages on the channel that delivered them.  Here verdicts are settled
later by another process, so a case's calls are compared as verdicts: ``ack`` is ``ACK``, a reject
with requeue is an immediate ``RETRY``, and without requeue a ``DEAD_LETTER``.  Rejections and
broken connections are tested with a real broker.
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
def open_queue() -> Iterator[Place]:
    """Opens a new queue at a real broker, which is never killed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(standing_queues, "_RELIABLE_AGE", 0.0),
    ):
        yield Place(wanted_server(), Path(folder))


def call_of(verdict: Verdict) -> list[Any]:
    """Returns the equivalent client call of Broadway for a verdict."""
    if verdict.action is Action.ACK:
        return ["ack"]
    assert verdict.delay == 0
    return ["reject", {"requeue": verdict.action is Action.RETRY}]


def message(producer: RabbitMQProducer, *, redelivered: bool = False) -> Message:
    """Creates a message; a redelivered one has a second attempt, which is Broadway's flag here."""
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
    # Like Broadway, when the producer starts, which fails without a broker.
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
    """Broadway acknowledges single messages, each of which the broker may reject.

    Here an acknowledgement purges the holding queue; only the publish of a verdict can be rejected
    for a single message.  So successful messages are dead-lettered, those that fail in the case
    through an exchange without a queue.  As in Broadway, every message is tried, and errors are
    reported (settle-failed).  Unlike Broadway, the failed list is still settled.  Rejected messages
    are redelivered in both.
    """
    given, expect = case["given"], case["expect"]
    with open_queue() as queue:
        exchange, sink = f"{queue.name}-exchange", f"{queue.name}-sink"
        queue.declare()
        with queue.channel() as channel:
            channel.exchange_declare(exchange, "headers")
            channel.queue_declare(sink)
            channel.queue_bind(sink, exchange, "", {"x-match": "all", "taken": True})
        for number in [*given["successful"], *given["failed"]]:
            taken = {"taken": number not in given["ack_error_on"]}
            queue.send(b"%d" % number, properties=pika.BasicProperties(headers=taken))
        options: dict[str, Any] = {
            "on_success": "reject",
            "on_failure": "reject_and_requeue",
            "dead_letter": {"exchange": exchange},
        }
        producer = queue.producer(**options)

        def verdict(number: int, item: Message) -> Verdict:
            failed = number in given["failed"]
            return producer.verdict(
                item.failed("why") if failed else item, failed=failed, stage="process"
            )

        with queue.source("g1", **options) as source:
            messages = queue.take(source)
            lease = source.lease
        numbers = {item.message_id: int(item.data) for item in messages}
        chosen = {item.message_id: verdict(numbers[item.message_id], item) for item in messages}
        custodian = producer.custodian(queue.env("custodian"))
        report = custodian.settle(lease, settlement_of(messages, chosen))
        custodian.close()

        accepted = []
        while (delivery := queue.get(sink)) is not None:
            accepted.append(int(delivery[1]))
        with queue.source("g2", **options) as source:
            redelivered = sorted(int(item.data) for item in queue.take(source))
    settled = [n for n in given["successful"] if n in accepted or n in redelivered]
    assert [["ack", number] for number in settled] == expect["calls"]
    assert set(accepted).isdisjoint(redelivered)
    assert redelivered == sorted([*given["ack_error_on"], *given["failed"]])
    assert report.failed == len(given["ack_error_on"])
    assert bool(report.errors) == expect["raises"]
    assert report.requeued == len(given["failed"])


def lost_channel(case: Case) -> None:
    """The connection breaks between a delivery and its securing."""
    given, expect = case["given"], case["expect"]
    numbers = [body for body in given["deliver"] if body != "break_conn"]
    with open_queue() as queue, Breaker(queue.server.address) as breaker:
        queue.declare()
        options: dict[str, Any] = {
            "uri": f"amqp://127.0.0.1:{breaker.port}",
            "qos": Qos(prefetch_count=1),  # so that the consumer exists when the connection breaks
            "backoff_min": 0.01,
        }
        queue.send(b"before")
        with queue.source("g1", **options) as source, logged() as warnings:
            [first] = source.secure(source.receive(1, timeout=5.0))
            # The response follows the acknowledgement of the first message, which must not break.
            cast(Any, source)._consumer.channel.call("basic_qos", prefetch_count=1)
            breaker.arm()
            queue.send(*[b"%d" % number for number in numbers])
            messages: list[Message] = []
            while len(messages) < len(numbers):
                delivery = source.secure(source.receive(1, timeout=5.0))
                assert delivery, "a message is lost"
                messages += delivery
            lease = source.lease
        custodian = queue.producer().custodian(queue.env("custodian"))
        report = custodian.settle(lease, settlement_of([first, *messages], {}))
        custodian.close()
    assert breaker.broken == 1
    assert [int(item.data) for item in messages] == numbers
    # An acknowledged delivery of the lost channel would not be redelivered and marked.
    acks = [] if messages[0].redelivered else numbers[:1]
    assert acks == expect["acks"]
    assert (
        bool([text for text in warnings if text.startswith("the connection to RabbitMQ")])
        == (expect["error_logged"])
    )
    assert report == SettleReport(acked=1 + len(numbers))


def no_ack(case: Case) -> None:
    # Automatic acknowledgement would lose messages in a crash, so there is no such option.
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
    for given, expected in zip(case["given"]["options"], case["expect"]["bounds"], strict=True):
        low, high = given.get("min"), given.get("max")
        bounds = backoff_bounds(low and low / 1000, high and high / 1000)
        assert [round(1000 * delay) for delay in bounds] == expected
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
