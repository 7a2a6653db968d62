"""The pipeline of the fault runs: what becomes of a message is a function of its number.

So what the end must be is known before anything is killed.  Every input of ``handle_batch`` is
written down, on disk, before anything is done with it: that is the evidence against which the
queue's own tables are held, whatever our reports say.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from typing import Any, NamedTuple

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, RetryPolicy
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.producers.sqs import SqsProducer

#: Recorded failures after which a message is a dead letter.
MAX_ATTEMPTS = 3

_TABLE = """CREATE TABLE IF NOT EXISTS handled (
    call INTEGER PRIMARY KEY AUTOINCREMENT, message_id TEXT, number INTEGER, attempt INTEGER,
    redelivered INTEGER, batcher TEXT, batch_id TEXT
)"""


class Handled(NamedTuple):
    """One message of one call of ``handle_batch``."""

    message_id: str
    number: int
    attempt: int
    redelivered: bool
    batcher: str
    batch_id: str

    @classmethod
    def of(cls, message: Message, number: int, info: BatchInfo) -> Handled:
        marks = message.attempt, message.redelivered
        return cls(message.message_id, number, *marks, info.batcher, info.batch_id)


def refused(number: int) -> bool:
    """Whether ``handle_message`` makes it a dead letter at first sight."""
    return number % 20 == 1


def fails_in_process(number: int, attempt: int) -> bool:
    return number % 20 == 2 and attempt == 1


def fails_in_batch(number: int, attempt: int) -> bool:
    """Of both batchers' messages some fail once, and some always."""
    return number % 20 in (3, 4) or (number % 20 in (5, 6) and attempt == 1)


def dies(number: int) -> bool:
    """Whether it ends as a dead letter; all others are acknowledged in the end."""
    return refused(number) or fails_in_batch(number, MAX_ATTEMPTS)


def attempts(number: int) -> int:
    """The attempt that is its last, if recorded failures alone use attempts up."""
    if refused(number):
        return 1
    attempt = 1
    while attempt < MAX_ATTEMPTS and (
        fails_in_process(number, attempt) or fails_in_batch(number, attempt)
    ):
        attempt += 1
    return attempt


def note(path: str, calls: Iterable[Handled]) -> None:
    """Writes inputs down; they are on disk when this returns."""
    with closing(sqlite3.connect(path, timeout=60.0)) as db, db:
        db.execute("PRAGMA synchronous=FULL")
        db.execute(_TABLE)
        db.executemany(
            "INSERT INTO handled (message_id, number, attempt, redelivered, batcher, batch_id)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            calls,
        )


def noted(path: str) -> list[Handled]:
    """All inputs there have been, in the order in which they were written down."""
    with closing(sqlite3.connect(path, timeout=60.0)) as db:
        db.execute(_TABLE)
        rows = db.execute(
            "SELECT message_id, number, attempt, redelivered, batcher, batch_id FROM handled"
            " ORDER BY call"
        )
        return [Handled(*row)._replace(redelivered=bool(row[3])) for row in rows]


class Killed(Broadway):
    producer: Any = SqliteProducer(
        queue="killed",
        conn_id="killed_queue",
        concurrency=2,
        lease=120.0,
        retry=RetryPolicy(max_attempts=MAX_ATTEMPTS, backoff=0.5, jitter=0.0),
    )
    processors = Processors(concurrency=2, max_demand=100)
    batchers = {
        "odd": Batcher(batch_size=200, concurrency=2, schema="number long"),
        "even": Batcher(engine="python", batch_size=100, batch_timeout=None),
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = int(message.data)
        # Slow enough to be killed at it.
        time.sleep(0.001)
        if refused(number):
            return message.configure_ack(on_failure="dead_letter").failed("refused by its number")
        if fails_in_process(number, message.attempt):
            raise ValueError("not at first")
        return message.put_data({"number": number}).put_batcher("odd" if number % 2 else "even")

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        if batcher == "even":
            return self._handle_list(messages, batch_info, context)
        from airflow_broadway.spark import failed

        columns = ("message_id", "data.number", "attempt", "redelivered")
        calls = [
            Handled(*row, batch_info.batcher, batch_info.batch_id)  # type: ignore[call-arg]
            for row in messages.select(*columns).collect()
        ]
        note(context["handled"], calls)
        time.sleep(0.5)
        bad = [call.message_id for call in calls if fails_in_batch(call.number, call.attempt)]
        return failed(bad, reason="failed by its number") if bad else None

    @staticmethod
    def _handle_list(messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        calls = [Handled.of(message, message.data["number"], batch_info) for message in messages]
        note(context["handled"], calls)
        time.sleep(0.3)
        return [
            message.failed("failed by its number")
            if fails_in_batch(item.number, item.attempt)
            else message
            for message, item in zip(messages, calls, strict=True)
        ]


class KilledRabbitMQ(Killed):
    """The same from RabbitMQ, whose leases are not renewed: they outlast what is killed here."""

    producer = RabbitMQProducer(
        queue="killed",
        conn_id="killed_rabbitmq",
        concurrency=2,
        lease=1800.0,
        on_failure="retry",
        retry=RetryPolicy(max_attempts=MAX_ATTEMPTS, backoff=0.5, jitter=0.0),
    )


class KilledSqs(Killed):
    """The same from SQS; messages whose receipt was never recorded are visible after a minute."""

    producer = SqsProducer(
        queue_name="killed",
        conn_id="killed_sqs",
        concurrency=2,
        receive_concurrency=4,
        wait_time_seconds=1,
        lease=60.0,
        on_failure="retry",
        retry=RetryPolicy(max_attempts=MAX_ATTEMPTS, backoff=0.5, jitter=0.0),
    )


class KilledKafka(Killed):
    """The same from Kafka, where a message that fails holds up no other."""

    producer = KafkaProducer(
        group_id="killed",
        topics=["killed"],
        conn_id="killed_kafka",
        order="none",
        offset_reset_policy="earliest",
        concurrency=2,
        lease=120.0,
        retry=RetryPolicy(max_attempts=MAX_ATTEMPTS, backoff=0.5, jitter=0.0),
    )


class KilledPubSub(Killed):
    """The same from Pub/Sub; messages whose ack id was never recorded return after a minute."""

    producer = PubSubProducer(
        subscription="killed",
        conn_id="killed_pubsub",
        dead_letter="killed-dead",
        concurrency=2,
        receive_timeout=2.0,
        lease=60.0,
        on_failure="retry",
        retry=RetryPolicy(max_attempts=MAX_ATTEMPTS, backoff=0.5, jitter=0.0),
    )


#: By the broker's name.
PIPELINES: dict[str, type[Killed]] = {
    "sqlite": Killed,
    "rabbitmq": KilledRabbitMQ,
    "sqs": KilledSqs,
    "kafka": KilledKafka,
    "pubsub": KilledPubSub,
}
