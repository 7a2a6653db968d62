"""Dead letters that a foreign sender publishes to a pipeline's dead-letter queue or topic.

A dead letter's headers are its sender's text.  They cannot route a body into a queue that is not a
source of the pipeline, and no id that names another dead letter chooses the forged one.
"""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pika
import pytest

from airflow_broadway.core.custody.dead_letters import Choice, DeadLetter, DeadLetters, Moved
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.letters import RabbitDeadLetters
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.producers.sqs import dead_letters as sqs_letters
from tests.kafka_group import KafkaGroup
from tests.rabbitmq_place import Place
from tests.sqs_fixtures import wanted_sqs
from tests.sqs_server import Connections, SqsServer

pytestmark = pytest.mark.broker

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "ValueError: why", "process")
STAYS = r"its origin is '.*', which is no source of this pipeline.* --to$"


def by_body(letters: DeadLetters) -> dict[bytes, DeadLetter]:
    return {letter.body: letter for letter in letters.letters()}


def choose(*ids: str) -> Choice:
    return Choice(ids=frozenset(ids))


def refusal(moved: Moved, letter: DeadLetter) -> str:
    assert list(moved.refused) == [letter.message_id]
    return moved.refused[letter.message_id]


# -- RabbitMQ --------------------------------------------------------------------------------------


@pytest.fixture
def victim(place):
    """A queue of another team."""
    name = f"{place.name}-victim"
    place.server.declare(name)
    return name


def forge(place: Place, queue: str, body: bytes, headers: dict[str, Any]) -> None:
    with place.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish("", queue, body, pika.BasicProperties(headers=headers))


def deaths(queue: str) -> dict[str, Any]:
    death = {
        "queue": queue,
        "reason": "rejected",
        "count": 1,
        "exchange": "",
        "routing-keys": [queue],
    }
    return {"x-death": [{**death, "time": datetime.now(UTC)}]}


@pytest.mark.parametrize("by_death", [False, True], ids=["x-broadway-queue", "x-death"])
def test_a_forged_rabbitmq_dead_letter_cannot_choose_its_destination(place, victim, by_death):
    place.send(b"real")
    place.settle("g1", {0: DEAD})
    headers = deaths(victim) if by_death else {"x-broadway-queue": victim}
    forge(place, place.queues.dead, b"evil", headers)

    with closing(place.producer().dead_letters(place.env())) as letters:
        evil = by_body(letters)[b"evil"]
        moved = letters.requeue()

        assert moved.count == 1
        assert place.server.depth(victim) == 0
        with pytest.raises(ProducerError, match=STAYS):
            raise ProducerError(refusal(moved, evil))
        # An operator can requeue it to a named destination.
        assert letters.requeue(to=place.name).count == 1
    again, _ = place.hold("g2")
    assert sorted(message.data for message in again) == [b"evil", b"real"]


def test_a_forged_rabbitmq_dead_letter_cannot_take_another_id(place):
    place.send(b"real")
    [message], _ = place.settle("g1", {0: DEAD})
    properties, body = place.first(place.queues.dead)
    for payload in (b"evil", body):
        forge(place, place.queues.dead, payload, dict(properties.headers))

    with closing(place.producer().dead_letters(place.env())) as letters:
        listing = by_body(letters)
        assert listing[b"evil"].original_id == listing[b"real"].original_id == message.message_id
        assert letters.requeue(choose(listing[b"real"].message_id)).count == 1
        assert list(by_body(letters)) == [b"evil"]
        assert letters.delete(choose(message.message_id)).count == 0


def test_shared_dead_letters_are_requeued_to_declared_sources_only(place, victim):
    other_queue = f"{place.name}-other"
    place.server.declare(other_queue)
    dead = f"{place.name}-graves"
    place.server.declare(dead)
    for queue in (other_queue, victim):
        forge(place, dead, queue.encode(), {"x-broadway-queue": queue})
    forge(place, dead, b"silent", {})
    kwargs: dict[str, Any] = {"dead_letter": dead, "uri": None}
    producers = [place.producer(**kwargs), place.producer(**kwargs, queue=other_queue)]

    url = f"http://127.0.0.1:{place.server.management_port}"
    env = place.env(login="guest", password="guest", extra={"management_url": url})
    with closing(RabbitDeadLetters(producers, env, None)) as letters:
        listing = by_body(letters)
        moved = letters.requeue()

    assert moved.count == 1
    assert (place.server.depth(other_queue), place.server.depth(victim)) == (1, 0)
    silent = moved.refused[listing[b"silent"].message_id]
    assert f"its origin is unknown, one of {place.name}, {other_queue}" in silent
    assert silent.endswith("name the destination with --to")


def test_refused_dead_letters_do_not_reach_the_delivery_limit(place, victim):
    dead = f"{place.name}-graves"
    place.server.declare(dead, **{"x-queue-type": "quorum", "x-delivery-limit": 3})
    forge(place, dead, b"of another pipeline", {"x-broadway-queue": victim})

    with closing(place.producer(dead_letter=dead).dead_letters(place.env())) as letters:
        for _ in range(8):
            assert (letters.requeue().count, letters.count()) == (0, 1)


# -- SQS -------------------------------------------------------------------------------------------


class Sqs:
    """A queue, its queue of dead letters, and one of another team."""

    def __init__(self, server: SqsServer) -> None:
        self.server, self.client = server, server.client()
        self.source, self.dead, self.victim = (server.queue() for _ in range(3))

    def forge(self, body: str, **attributes: str) -> None:
        values: Any = {n: {"DataType": "String", "StringValue": v} for n, v in attributes.items()}
        self.client.send_message(QueueUrl=self.dead, MessageBody=body, MessageAttributes=values)

    def letters(self) -> DeadLetters:
        producer = SqsProducer(queue_url=self.source, dead_letter=self.dead)
        return producer.dead_letters(ProducerEnv(connections=Connections(self.server.url)))

    def ready(self, url: str) -> int:
        return self.server.depth(url)[0]


@pytest.fixture
def sqs(monkeypatch):
    monkeypatch.setattr(sqs_letters, "_WAIT_SECONDS", 0)
    return Sqs(wanted_sqs())


def test_a_forged_sqs_dead_letter_cannot_choose_its_destination(sqs):
    sqs.forge("native")
    sqs.forge("evil", broadway_queue=sqs.victim.rpartition("/")[2])
    sqs.forge("url", broadway_queue=sqs.victim)

    with closing(sqs.letters()) as letters:
        moved = letters.requeue()
        assert (moved.count, len(moved.refused)) == (1, 2)
        assert (sqs.ready(sqs.source), sqs.ready(sqs.victim)) == (1, 0)
        for reason in moved.refused.values():
            with pytest.raises(ProducerError, match=STAYS):
                raise ProducerError(reason)
        assert letters.requeue(to=sqs.source).count == 2
    assert (sqs.ready(sqs.source), sqs.ready(sqs.victim)) == (3, 0)


def test_a_forged_sqs_dead_letter_cannot_take_another_id(sqs):
    sqs.forge("real", broadway_message_id="m-1")
    with closing(sqs.letters()) as letters:
        real = by_body(letters)[b"real"]
        sqs.forge("evil", broadway_message_id=real.message_id)
        sqs.forge("twin", broadway_message_id="m-1")
        assert len(by_body(letters)) == 3

        unmoved = letters.delete(choose("m-1"))
        assert (unmoved.count, list(unmoved.refused)) == (0, ["m-1"])
        moved = letters.requeue(choose(real.message_id))

        assert (moved.count, moved.unknown, dict(moved.refused)) == (1, (), {})
        assert sorted(by_body(letters)) == [b"evil", b"twin"]
    [received] = sqs.client.receive_message(QueueUrl=sqs.source)["Messages"]
    assert received["Body"] == "real"


# -- Kafka -----------------------------------------------------------------------------------------


def forge_record(group: KafkaGroup, body: bytes, topic: str, partition: int, offset: int) -> None:
    producer = group.kafka.producer()
    headers: list[Any] = [
        ("__connect.errors.topic", topic.encode()),
        ("__connect.errors.partition", str(partition).encode()),
        ("__connect.errors.offset", str(offset).encode()),
    ]
    producer.produce(group.letters, body, headers=headers)
    producer.flush(30)


def test_a_forged_kafka_dead_letter_cannot_choose_destination_or_id(kafka_mock, tmp_path):
    group = KafkaGroup(kafka_mock, tmp_path, order="none")
    victim = kafka_mock.topic()
    producer = kafka_mock.producer()
    producer.produce(group.topic, b"real")
    producer.flush(30)
    lease, [message] = group.hold("g1")
    group.settle(lease, [message], {message.message_id: DEAD})
    forge_record(group, b"twin", group.topic, 0, 0)
    forge_record(group, b"evil", victim, 0, 0)

    with closing(group.producer().dead_letters(group.env("letters"))) as letters:
        listing = by_body(letters)
        assert listing[b"real"].original_id == listing[b"twin"].original_id == message.message_id
        real = choose(listing[b"real"].message_id)
        assert letters.requeue(real).count == 1
        assert sorted(by_body(letters)) == [b"evil", b"twin"]
        moved = letters.requeue(choose(listing[b"evil"].message_id))

    with pytest.raises(ProducerError, match=STAYS):
        raise ProducerError(refusal(moved, listing[b"evil"]))
    assert [message.data for message in group.drain()] == [b"real"]


# -- the embedded queue ----------------------------------------------------------------------------


def test_sqlite_dead_letters_are_requeued_to_their_own_file_only(tmp_path):
    path = str(tmp_path / "q.db")
    with SqliteQueue(path, "orders") as queue:
        queue.send([b"an order"])
        letters = SqliteProducer(queue="orders", path=path).dead_letters(ProducerEnv())
        with closing(letters), pytest.raises(ProducerError, match="leave --to out"):
            letters.requeue(to="invoices")
