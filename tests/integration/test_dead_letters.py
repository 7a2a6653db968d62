"""Dead letters at real brokers: specific behaviour; the rest is ``DeadLettersContract``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, nullcontext
from typing import Any

import pika
import pytest

from airflow_broadway.core.custody.dead_letters import Choice, DeadLetters
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp import channels
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Channel, ConnectionThread
from tests.cli_runs import ran
from tests.kafka_group import KafkaGroup

pytestmark = pytest.mark.broker

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "ValueError: why", "process")


def list_dead_letters(
    letters: DeadLetters, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Lists the second dead letter, and the number of each reason, as the page does."""
    patch.setattr(
        "airflow_broadway.cli.dead_letters._open_dead_letters", lambda args: nullcontext(letters)
    )
    words = ["--by-reason", "--seconds=60", "--limit=1", "--offset=1", "--json"]
    return ran(capsys, "dead-letters", "list", "--pipeline=its.own:Pipeline", *words).json


# -- RabbitMQ --------------------------------------------------------------------------------------


def test_requeued_rabbitmq_dead_letters_keep_route_headers_and_properties(place):
    # Given a message from an exchange, as a dead letter
    exchange = f"{place.name}-shop"
    with place.channel() as channel:
        channel.exchange_declare(exchange, "topic")
        channel.queue_bind(place.name, exchange, "orders.#")
        channel.confirm_delivery()
        properties = pika.BasicProperties(
            user_id="guest", type="created", headers={"colour": "red"}, priority=3
        )
        channel.basic_publish(exchange, "orders.eu.created", b"order", properties)
    options: dict[str, Any] = {
        "metadata": ["exchange", "routing_key", "headers", "type", "priority", "user_id"]
    }
    [first], _ = place.settle("g1", {0: DEAD}, **options)

    # When it is listed, and requeued
    with closing(place.producer().dead_letters(place.env())) as letters:
        [letter] = letters.letters()
        moved = letters.requeue()

    # Then it was listed with its route, and is redelivered with it
    assert (letter.properties["exchange"], letter.properties["routing_key"]) == (
        exchange,
        "orders.eu.created",
    )
    assert letter.properties["headers"] == {"colour": "red"}
    assert (letter.reason, letter.stage) == ("ValueError: why", "process")
    assert (letter.origin, letter.generation) == (place.name, "g1")
    assert moved.count == 1
    [again], _ = place.settle("g2", **options)
    assert again.message_id == first.message_id
    assert dict(again.metadata) == dict(first.metadata)
    assert (again.attempt, again.redelivered) == (1, True)


def test_rabbitmqs_own_dead_letters_are_recognized_by_x_death(undeclared):
    # Given a queue whose dead letters the broker itself routes, without our headers
    dead = f"{undeclared.name}-graves"
    undeclared.server.declare(dead, **{"x-queue-type": "quorum"})
    undeclared.declare(**{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead})
    undeclared.send(b"one", b"two")
    with undeclared.channel() as channel:
        for _ in range(2):
            method, _, _ = channel.basic_get(undeclared.name)
            channel.basic_reject(method.delivery_tag, requeue=False)

    url = f"http://127.0.0.1:{undeclared.server.management_port}"
    env = undeclared.env(login="guest", password="guest", extra={"management_url": url})
    with closing(undeclared.producer(dead_letter=dead, uri=None).dead_letters(env)) as letters:
        first, second = letters.letters()
        moved = letters.requeue(Choice(ids=frozenset({first.message_id})))
        left = list(letters.letters())

    assert {first.body, second.body} == {b"one", b"two"}
    assert first.message_id != second.message_id
    assert (first.reason, first.origin) == ("rejected", undeclared.name)
    assert first.died_at is not None
    assert (moved.count, [message.body for message in left]) == (1, [second.body])
    [again], _ = undeclared.hold("g1", dead_letter=dead, metadata=["exchange", "routing_key"])
    assert (again.data, again.redelivered) == (first.body, True)
    assert again.metadata["routing_key"] == undeclared.name


def test_dead_letters_that_cannot_be_requeued_stay_with_a_reason(place):
    place.send(b"a", b"b")
    place.settle("g1", {0: DEAD, 1: DEAD})
    with place.channel() as channel:
        channel.queue_delete(place.name)

    with closing(place.producer().dead_letters(place.env())) as letters:
        moved = letters.requeue()

        assert moved.count == 0
        assert all("NO_ROUTE" in reason for reason in moved.refused.values())
        assert len(moved.refused) == letters.count() == 2


def test_a_dead_letter_exchange_needs_the_queues_name(place):
    producer = place.producer(dead_letter={"exchange": "graves"})
    with pytest.raises(ProducerError, match=r"go to the exchange 'graves'.*name the queue"):
        producer.dead_letters(place.env())
    with closing(producer.dead_letters(place.env(), place=place.name)) as letters:
        assert letters.place == f"queue {place.name!r}"


def test_listed_rabbitmq_dead_letters_return_to_their_queue(place, monkeypatch, capsys):
    place.send(b"1", b"2", b"3")
    place.settle("g1", {0: DEAD, 1: DEAD, 2: DEAD})

    with closing(place.producer().dead_letters(place.env())) as letters:
        listing = list_dead_letters(letters, monkeypatch, capsys)
        assert letters.count() == 3

    assert (listing["total"], listing["matching"], listing["whole"]) == (3, 3, True)
    assert listing["reasons"] == [{"count": 3, "stage": "process", "reason": "ValueError: why"}]
    assert len(listing["letters"]) == 1


@pytest.mark.parametrize("look", ["list", "delete", "requeue"])
def test_rabbitmq_dead_letters_are_back_before_a_late_channel_close(place, monkeypatch, look):
    place.send(b"1", b"2", b"3")
    place.settle("g1", {0: DEAD, 1: DEAD, 2: DEAD})
    chosen = Choice(reason="nothing like it")
    open_connections: list[ConnectionThread] = []

    def stay_open(connection: ConnectionThread) -> None:
        open_connections.append(connection)

    letters = place.producer().dead_letters(place.env())
    with monkeypatch.context() as slow:
        # Given a broker that detects a closed channel late: as if nothing closed
        slow.setattr(ConnectionThread, "close", stay_open)
        slow.setattr(Channel, "close", lambda self: None)

        if look == "list":
            assert list(letters.letters(chosen)) == []
        else:
            assert getattr(letters, look)(chosen).count == 0

        assert letters.count() == 3
    for connection in open_connections:
        connection.close()


@pytest.mark.parametrize(
    ("late", "within", "counted"),
    [(4, 60.0, [2, 2, 2, 2, 5]), (9, 0.0, [2, 2])],
    ids=["returned late", "received by others"],
)
def test_browsing_rabbitmq_dead_letters_waits_until_they_are_counted_again(
    place, monkeypatch, late, within, counted
):
    place.send(b"1", b"2", b"3", b"4", b"5")
    place.settle("g1", dict.fromkeys(range(5), DEAD))
    call, counts = Channel.call, list[int]()

    def slow(channel: Channel, name: str, *rest: Any, **arguments: Any) -> Any:
        response = call(channel, name, *rest, **arguments)
        if name == "queue_declare":
            if len(counts) < late:
                response.method.message_count = 2
            counts.append(response.method.message_count)
        return response

    monkeypatch.setattr(channels, "_REQUEUE_TIMEOUT", within)
    with closing(place.producer().dead_letters(place.env())) as letters:
        listing = letters.letters()
        for _ in range(3):
            next(listing)
        # Given a queue to which dead letters return late, or never
        monkeypatch.setattr(Channel, "call", slow)

        assert isinstance(listing, Generator)
        listing.close()

    assert counts == counted


@pytest.mark.parametrize("act", ["delete", "requeue"])
def test_acknowledged_rabbitmq_dead_letters_are_not_waited_for(place, monkeypatch, act):
    place.send(b"1", b"2", b"3", b"4", b"5")
    other_verdict = DEAD._replace(reason="KeyError: other")
    place.settle("g1", {0: DEAD, 1: other_verdict, 2: DEAD, 3: other_verdict, 4: DEAD})
    call, counts = Channel.call, list[int]()

    def record_count(channel: Channel, name: str, *rest: Any, **arguments: Any) -> Any:
        response = call(channel, name, *rest, **arguments)
        if name == "queue_declare":
            counts.append(response.method.message_count)
        return response

    monkeypatch.setattr(channels, "_REQUEUE_TIMEOUT", 60.0)
    with closing(place.producer().dead_letters(place.env())) as letters:
        monkeypatch.setattr(Channel, "call", record_count)

        assert getattr(letters, act)(Choice(reason="KeyError")).count == 2

    # All are ready, all are received; the three that were not chosen are back
    assert (counts[0], counts[1], counts[-1], counts.count(3)) == (5, 0, 3, 1)


# -- Kafka -----------------------------------------------------------------------------------------


def dead_letter_one(group: KafkaGroup, **fields: Any) -> None:
    producer = group.kafka.producer()
    producer.produce(group.topic, b"body", b"key", **fields)
    producer.flush(30)
    lease, [message] = group.hold("g1")
    group.settle(lease, [message], {message.message_id: DEAD})


def test_requeued_kafka_dead_letters_keep_partition_key_and_headers(kafka_mock, tmp_path):
    group = KafkaGroup(kafka_mock, tmp_path, order="none")
    own: list[Any] = [("trace", b"\xff"), ("none", None)]
    dead_letter_one(group, headers=own, partition=0)

    with closing(group.producer().dead_letters(group.env("letters"))) as letters:
        [letter] = letters.letters()
        assert letters.requeue().count == 1

    assert (letter.origin, letter.properties["key"]) == (group.topic, "key")
    assert (letter.reason, letter.stage, letter.attempt) == ("ValueError: why", "process", 1)
    _, [again] = group.hold("g2")
    assert again.metadata["partition"] == 0
    assert again.metadata["key"] == "key"
    assert again.metadata["headers"] == [
        ["trace", "base64:/w=="],
        ["none", None],
        ["broadway.requeued", letter.original_id],
    ]
    assert (again.redelivered, again.attempt) == (True, 1)


def test_kafka_dead_letters_are_counted_and_listed(kafka_mock, tmp_path, monkeypatch, capsys):
    group = KafkaGroup(kafka_mock, tmp_path, order="none")
    dead_letter_one(group, partition=0)

    with closing(group.producer().dead_letters(group.env("letters"))) as letters:
        listing = list_dead_letters(letters, monkeypatch, capsys)

    assert (listing["total"], listing["matching"], listing["whole"]) == (1, 1, True)
    assert (listing["reasons"][0]["count"], listing["letters"]) == (1, [])


def test_requeueing_kafka_dead_letters_needs_staging(kafka_mock, tmp_path):
    group = KafkaGroup(kafka_mock, tmp_path, order="none")
    dead_letter_one(group, partition=0)
    group.staging = None
    with closing(group.producer().dead_letters(group.env("letters"))) as letters:
        assert letters.count() == len(list(letters.letters())) == 1
        with pytest.raises(ProducerError, match="pipeline's staging folder"):
            letters.requeue()


def test_a_missing_dead_letter_topic_is_named(kafka_mock, tmp_path):
    group = KafkaGroup(kafka_mock, tmp_path)
    with pytest.raises(ProducerError, match=r"there is no topic 'no-such' for dead letters .*"):
        group.producer().dead_letters(group.env("letters"), place="no-such")
