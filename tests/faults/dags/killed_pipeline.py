"""The pipeline of the fault runs: a message's number determines its final state.

``handle_batch`` records every input on disk before it handles it.  The tests compare this record
with the queue's contents, independently of the package's reports.
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

#: Recorded failures after which a message is dead-lettered.
MAX_ATTEMPTS = 3

_TABLE = """CREATE TABLE IF NOT EXISTS handled (
    call INTEGER PRIMARY KEY AUTOINCREMENT, message_id TEXT, number INTEGER, attempt INTEGER,
    redelivered INTEGER, batcher TEXT, batch_id TEXT
)"""


class BatchInput(NamedTuple):
    """A message that ``handle_batch`` received."""

    message_id: str
    number: int
    attempt: int
    redelivered: bool
    batcher: str
    batch_id: str

    @classmethod
    def from_message(cls, message: Message, number: int, info: BatchInfo) -> BatchInput:
        marks = message.attempt, message.redelivered
        return cls(message.message_id, number, *marks, info.batcher, info.batch_id)


def is_rejected(number: int) -> bool:
    """Returns whether ``handle_message`` dead-letters it at its first attempt."""
    return number % 20 == 1


def fails_in_process(number: int, attempt: int) -> bool:
    return number % 20 == 2 and attempt == 1


def fails_in_batch(number: int, attempt: int) -> bool:
    """Returns whether ``handle_batch`` fails it: some messages fail once, some always."""
    return number % 20 in (3, 4) or (number % 20 in (5, 6) and attempt == 1)


def becomes_dead_letter(number: int) -> bool:
    """Returns whether it is dead-lettered in the end; otherwise it is acknowledged."""
    return is_rejected(number) or fails_in_batch(number, MAX_ATTEMPTS)


def attempts(number: int) -> int:
    """Returns its last attempt, provided that only recorded failures use up attempts."""
    if is_rejected(number):
        return 1
    attempt = 1
    while attempt < MAX_ATTEMPTS and (
        fails_in_process(number, attempt) or fails_in_batch(number, attempt)
    ):
        attempt += 1
    return attempt


def record_inputs(path: str, calls: Iterable[BatchInput]) -> None:
    """Records inputs; they are on disk when this returns."""
    with closing(sqlite3.connect(path, timeout=60.0)) as db, db:
        db.execute("PRAGMA synchronous=FULL")
        db.execute(_TABLE)
        db.executemany(
            "INSERT INTO handled (message_id, number, attempt, redelivered, batcher, batch_id)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            calls,
        )


def read_inputs(path: str) -> list[BatchInput]:
    """Reads all recorded inputs, oldest first."""
    with closing(sqlite3.connect(path, timeout=60.0)) as db:
        db.execute(_TABLE)
        rows = db.execute(
            "SELECT message_id, number, attempt, redelivered, batcher, batch_id FROM handled"
            " ORDER BY call"
        )
        return [BatchInput(*row)._replace(redelivered=bool(row[3])) for row in rows]


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
        # Slow enough for a kill to hit it.
        time.sleep(0.001)
        if is_rejected(number):
            return message.configure_ack(on_failure="dead_letter").failed("rejected by its number")
        if fails_in_process(number, message.attempt):
            raise ValueError("fails at the first attempt")
        return message.put_data({"number": number}).put_batcher("odd" if number % 2 else "even")

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        if batcher == "even":
            return self._handle_list(messages, batch_info, context)
        from airflow_broadway.spark import failed

        columns = ("message_id", "data.number", "attempt", "redelivered")
        calls = [
            BatchInput(*row, batch_info.batcher, batch_info.batch_id)  # type: ignore[call-arg]
            for row in messages.select(*columns).collect()
        ]
        record_inputs(context["handled"], calls)
        time.sleep(0.5)
        failed_ids = [
            call.message_id for call in calls if fails_in_batch(call.number, call.attempt)
        ]
        return failed(failed_ids, reason="failed by its number") if failed_ids else None

    @staticmethod
    def _handle_list(messages: list[Message], batch_info: BatchInfo, context: Any) -> list[Message]:
        calls = [
            BatchInput.from_message(message, message.data["number"], batch_info)
            for message in messages
        ]
        record_inputs(context["handled"], calls)
        time.sleep(0.3)
        return [
            message.failed("failed by its number")
            if fails_in_batch(item.number, item.attempt)
            else message
            for message, item in zip(messages, calls, strict=True)
        ]


class KilledRabbitMQ(Killed):
    """Reads RabbitMQ; leases are not renewed there, so they outlast the kills."""

    producer = RabbitMQProducer(
        queue="killed",
        conn_id="killed_rabbitmq",
        concurrency=2,
        lease=1800.0,
        on_failure="retry",
        retry=RetryPolicy(max_attempts=MAX_ATTEMPTS, backoff=0.5, jitter=0.0),
    )


class KilledSqs(Killed):
    """Reads SQS; a message whose receipt was not recorded is visible again after a minute."""

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
    """Reads Kafka without order, so that a failed message does not block others."""

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
    """Reads Pub/Sub; a message whose ack id was not recorded is redelivered after a minute."""

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
