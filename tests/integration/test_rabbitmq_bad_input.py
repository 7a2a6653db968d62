"""Bad input to a real RabbitMQ: one clear error or a failed message each; no hang, nothing lost."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ConnectionMissing, ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    ConnectionThread,
    RawProperties,
)
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.marks import MARK, ORIGINAL
from airflow_broadway.testing.contract import ids, settlement_of
from tests.rabbitmq_place import PASSWORD, manage, permitted

pytestmark = pytest.mark.broker

RETRY = Verdict(Action.RETRY, 0.0, "again", "process")
DEAD = Verdict(Action.DEAD_LETTER, 0.0, "why", "process")


# -- refusals ----------------------------------------------------------------------------------


def test_wrong_credentials_are_one_clear_error_without_the_password(undeclared, caplog):
    caplog.set_level("DEBUG")
    caplog.set_level("DEBUG", logger="pika")  # without a level, our client sets CRITICAL
    producer = RabbitMQProducer(queue=undeclared.name, conn_id="rabbit")

    with pytest.raises(ProducerError, match="refused the login of user 'me'") as raised:
        producer.source(undeclared.env(login="me", password=PASSWORD))

    assert PASSWORD not in str(raised.value) + caplog.text


@pytest.mark.parametrize(
    ("options", "env", "error", "text"),
    [
        ({"conn_id": "rabbit"}, {"schema": "nowhere"}, ProducerError, "virtual host 'nowhere'"),
        (
            {"uri": "amqp://127.0.0.1:1", "reconnect_timeout": 0.1},
            {},
            ProducerUnavailable,
            r"127\.0\.0\.1:1 cannot be reached",
        ),
        (
            {"uri": "amqp://no-such-host.invalid", "backoff_type": "stop"},
            {},
            ProducerUnavailable,
            "name is not known",
        ),
        (
            {"conn_id": "rabbit"},
            {"extra": {"tls": {"ca": "/no/such/file"}}},
            ConnectionMissing,
            "TLS files",
        ),
    ],
    ids=["missing virtual host", "unreachable broker", "unknown host", "unreadable TLS files"],
)
def test_a_connection_that_cannot_be_made_is_one_clear_error(undeclared, options, env, error, text):
    producer = RabbitMQProducer(queue=undeclared.name, **options)

    with pytest.raises(error, match=text):
        producer.source(undeclared.env(**env))


def test_a_missing_queue_is_named_with_the_remedy(undeclared):
    with pytest.raises(ProducerError, match=rf"{undeclared.name}.*NOT_FOUND.*declare"):
        undeclared.producer().source(undeclared.env())


def test_a_queue_declared_with_other_arguments_is_refused(place):
    with pytest.raises(ProducerError, match=r"PRECONDITION_FAILED.*other arguments"):
        place.producer(declare={"durable": True, "arguments": {"x-max-priority": 3}}).source(
            place.env()
        )


@pytest.mark.parametrize("name", ["held", "dead"])
def test_a_holding_queue_of_another_type_receives_no_message(place, name):
    # Given one of our queues as a classic queue
    place.send(b"1")
    queue = place.queues.dead if name == "dead" else place.queues.held(0)
    with place.channel() as channel:
        channel.queue_declare(queue, durable=True)

    # When a run receives, it fails
    with place.source() as source:
        pattern = rf"{queue}.*inequivalent arg.*declare it as it is, or delete it once it is empty"
        with pytest.raises(ProducerError, match=pattern):
            source.receive(10, timeout=1.0)

    # Then nothing is lost
    with place.channel() as channel:
        channel.queue_delete(queue)
    assert [message.data for message in place.settle("g2")[0]] == [b"1"]


@pytest.mark.parametrize(
    ("lacking", "expected"),
    [("configure", "access to queue"), ("write", "access to"), ("read", "access to queue")],
)
def test_a_missing_permission_is_named(place, lacking, expected):
    place.send(b"1")
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit")

    with (  # noqa: PT012
        permitted(place.server, **{lacking: "^$"}) as user,
        pytest.raises(ProducerError, match=expected) as raised,
    ):
        source = producer.source(place.env(**user))
        try:
            source.receive(10, timeout=2.0)
        finally:
            source.close()

    assert "permissions in docs/rabbitmq.md" in str(raised.value)
    assert PASSWORD not in str(raised.value)
    assert len(place.settle("g2")[0]) == 1


def test_a_missing_permission_at_settlement_loses_nothing(place):
    # Given a run whose user loses the write permission before settlement
    place.send(b"1", b"2")
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit", on_failure="retry")

    with permitted(place.server) as user:
        source = producer.source(place.env(**user))
        messages = place.take(source)
        lease = source.lease
        source.close()
        settlement = settlement_of(messages, {messages[0].message_id: RETRY})
        fewer = {"configure": ".*", "write": r"^broadway\.", "read": ".*"}
        manage(place.server, "PUT", f"permissions/%2F/{user['login']}", fewer)

        # When a message is to be retried
        custodian = producer.custodian(place.env("settling", **user))
        with pytest.raises(ProducerError, match=r"ACCESS_REFUSED.*amq\.default") as raised:
            custodian.settle(lease, settlement)
        custodian.close()

    # Then nothing is settled until the permission is granted again
    assert PASSWORD not in str(raised.value)
    assert place.carry_out(lease, settlement) == SettleReport(acked=1, requeued=1)
    assert [message.data for message in place.settle("g2")[0]] == [b"1"]


# -- messages ----------------------------------------------------------------------------------


def test_undecodable_headers_are_harmless(place):
    connection = ConnectionThread(address_for(place.producer(), place.env()))
    table = b"\x01kS\x00\x00\x00\x02\xff\xfe\x02\xff\xfet\x01"
    properties = b"\x20\x00" + struct.pack(">I", len(table)) + table
    channel = connection.channel()
    connection.post(
        lambda: channel.raw.basic_publish("", place.name, b"odd", RawProperties(properties))
    )
    channel.flush_and_close()
    connection.close()
    place.send(b"plain")
    retry = Verdict(Action.RETRY, 0.0, "again", "process")

    messages, report = place.settle("g1", {0: retry, 1: retry}, metadata=["headers"])
    retried, _ = place.settle("g2", metadata=["headers"])

    assert sorted(message.data for message in messages) == [b"odd", b"plain"]
    assert report == SettleReport(requeued=2)
    assert sorted(ids(retried)) == sorted(ids(messages))


def nested(depth: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for _ in range(depth):
        result = {"n": result}
    return result


#: Headers that a broker accepts from a sender.
HOSTILE: dict[str, dict[str, Any]] = {
    "nested": {"n": nested(40)},
    "nested beyond reason": {"n": nested(200)},
    "huge": {"text": "x" * 120_000},
    "many": {f"h{number}": number for number in range(5_000)},
    "types": {"list": [None, True, -1, 2**62, "x", [[]], {"in": [b"\xff"]}], "": "no name"},
    "a mark that is a number": {MARK: 5},
    "a mark of wrong types": {MARK: {"id": 7, "giver": None, "attempt": "two"}},
    "a mark from before the first attempt": {MARK: {"id": "x", "giver": "g", "attempt": -5}},
    "a mark with a huge id": {MARK: {"id": "x" * 50_000, "giver": "g", "attempt": 1}},
    "an original that is text": {ORIGINAL: "no table"},
    "deaths that are a number": {"x-death": 3},
}


def test_hostile_headers_are_received_and_survive_every_verdict(place):
    # Given a message with each of these headers
    connection = ConnectionThread(address_for(place.producer(), place.env()))
    channel = connection.channel()
    for name, headers in HOSTILE.items():
        raw = RawProperties(encode(headers=headers))
        connection.post(partial(channel.raw.basic_publish, "", place.name, name.encode(), raw))
    channel.flush_and_close()
    connection.close()
    place.send(b"plain")
    sent = sorted([*HOSTILE, "plain"])

    # When every one is retried, then dead-lettered
    retry_all = dict.fromkeys(range(len(sent)), RETRY)
    options: dict[str, Any] = {"metadata": ["headers", "priority"]}
    first, first_report = place.settle("g1", retry_all, **options)
    second, second_report = place.settle("g2", dict.fromkeys(retry_all, DEAD), **options)

    # Then no message is missing at any time, and redelivered ones keep their identity
    assert sorted(message.data.decode() for message in first) == sent
    assert first_report.requeued + first_report.failed + first_report.dead_lettered == len(sent)
    assert sorted(message.data.decode() for message in second) == sent
    assert sorted(ids(first)) == sorted(ids(second))
    assert all(len(message.message_id) < 300 for message in first)
    assert second_report.dead_lettered + second_report.failed == len(sent)
    bodies = [message.data.decode() for message in place.settle("g3")[0]]
    while (dead_letter := place.get(place.queues.dead)) is not None:
        bodies.append(dead_letter[1].decode())
    assert sorted(bodies) == sent
    assert (first_report.failed, second_report.failed) == (0, 0), (first_report, second_report)
