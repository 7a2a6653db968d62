"""The pipelines of the living tests: what becomes of a message is a function of its number."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, RetryPolicy
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.producers.sqs import SqsProducer
from tests.living.brokers import LEASE
from tests.living.publisher import number_of
from tests.living.sink import Handled, note

_RETRY = RetryPolicy(max_attempts=2, backoff=0.3, jitter=0.0)

#: How many messages and batches each run of this process has seen.
_seen: Counter[str] = Counter()
_batches: Counter[str] = Counter()


def fails_at_first(number: int) -> bool:
    """Whether ``handle_message`` fails it at its first attempt."""
    return number % 10 == 3


def fails_for_good(number: int) -> bool:
    """Whether ``handle_batch`` fails it at every attempt: it ends as a dead letter."""
    return number % 17 == 5


def broken_transformer(message: Message) -> Message:
    """Breaks at the first message of a hundred."""
    if number_of(message.data) % 100 == 0:
        raise KeyboardInterrupt  # never taken for a failure of the message
    return message


class _Living(Broadway):
    """The common base of all.

    ``context``: ``sink``, the file; ``run``, its name; ``slow``, seconds for each message; and
    ``poison`` and ``late_poison``: at which message, and after which batch, of the run a callback
    ends the process's work.
    """

    processors = Processors(concurrency=1, max_demand=20)
    batchers = {"default": Batcher(engine="python", batch_size=50, batch_timeout=0.2)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = number_of(message.data)
        _seen[context["run"]] += 1
        if context.get("slow"):
            time.sleep(context["slow"])
        if _seen[context["run"]] == context.get("poison"):
            raise KeyboardInterrupt("poison")
        if fails_at_first(number) and message.attempt == 1:
            return message.failed("at first")
        return message.put_data({"number": number})

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        done = [message for message in messages if not fails_for_good(message.data["number"])]
        note(
            context["sink"],
            [
                Handled(
                    message.data["number"],
                    message.message_id,
                    message.attempt,
                    message.redelivered,
                    batch_info.batch_id,
                    context["run"],
                )
                for message in done
            ],
        )
        _batches[context["run"]] += 1
        if _batches[context["run"]] == context.get("late_poison"):
            raise KeyboardInterrupt("late poison")
        return [
            message.failed("for good") if fails_for_good(message.data["number"]) else message
            for message in messages
        ]


class LivingSqlite(_Living):
    producer = SqliteProducer(queue="living", path="/replaced", lease=LEASE, retry=_RETRY)


class LivingRabbitMQ(_Living):
    producer = RabbitMQProducer(
        queue="living", uri="amqp://replaced", lease=LEASE, on_failure="retry", retry=_RETRY
    )


class LivingSqs(_Living):
    producer = SqsProducer(
        queue_url="http://127.0.0.1:1/0/replaced",
        conn_id="living",
        lease=LEASE,
        wait_time_seconds=0,
        receive_interval=0.1,
        receive_concurrency=4,
        on_failure="retry",
        retry=_RETRY,
    )


class LivingKafka(_Living):
    producer = KafkaProducer(
        group_id="replaced",
        topics=["replaced"],
        conn_id="living",
        offset_reset_policy="earliest",
        lease=LEASE,
        settings={"fetch.wait.max.ms": 50},
        on_failure="retry",
        retry=_RETRY,
    )


class LivingPubSub(_Living):
    producer = PubSubProducer(
        subscription="replaced",
        conn_id=None,
        lease=LEASE,
        receive_interval=0.1,
        receive_concurrency=4,
        on_failure="retry",
        retry=_RETRY,
    )


PIPELINES: dict[str, type[Broadway]] = {
    "sqlite": LivingSqlite,
    "rabbitmq": LivingRabbitMQ,
    "sqs": LivingSqs,
    "kafka": LivingKafka,
    "pubsub": LivingPubSub,
}
