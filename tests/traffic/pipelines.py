"""The pipelines of the traffic tests: a message's number determines its final state."""

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
from tests.traffic.brokers import LEASE
from tests.traffic.publisher import number_of
from tests.traffic.sink import HandledMessage, record_handled

_RETRY = RetryPolicy(max_attempts=2, backoff=0.3, jitter=0.0)

#: Messages and batches that each run of this process has received.
_messages_seen: Counter[str] = Counter()
_batches_seen: Counter[str] = Counter()


def fails_at_first(number: int) -> bool:
    """Returns whether ``handle_message`` fails it at its first attempt."""
    return number % 10 == 3


def fails_for_good(number: int) -> bool:
    """Returns whether ``handle_batch`` fails it at every attempt, so that it is dead-lettered."""
    return number % 17 == 5


def broken_transformer(message: Message) -> Message:
    """Raises at every hundredth message."""
    if number_of(message.data) % 100 == 0:
        raise KeyboardInterrupt  # not an Exception: it ends the run instead of failing the message
    return message


class TrafficPipeline(Broadway):
    """The base class of the pipelines.

    ``context``: ``sink``, the sink's file; ``run``, the run's name; ``slow``, seconds per message;
    ``poison`` and ``late_poison``, the number of the run's message or batch at which the callback
    raises ``KeyboardInterrupt``.
    """

    processors = Processors(concurrency=1, max_demand=20)
    batchers = {"default": Batcher(engine="python", batch_size=50, batch_timeout=0.2)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = number_of(message.data)
        _messages_seen[context["run"]] += 1
        if context.get("slow"):
            time.sleep(context["slow"])
        if _messages_seen[context["run"]] == context.get("poison"):
            raise KeyboardInterrupt("poison")
        if fails_at_first(number) and message.attempt == 1:
            return message.failed("fails at the first attempt")
        return message.put_data({"number": number})

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        done = [message for message in messages if not fails_for_good(message.data["number"])]
        record_handled(
            context["sink"],
            [
                HandledMessage(
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
        _batches_seen[context["run"]] += 1
        if _batches_seen[context["run"]] == context.get("late_poison"):
            raise KeyboardInterrupt("late poison")
        return [
            message.failed("fails at every attempt")
            if fails_for_good(message.data["number"])
            else message
            for message in messages
        ]


class SqlitePipeline(TrafficPipeline):
    producer = SqliteProducer(queue="traffic", path="/replaced", lease=LEASE, retry=_RETRY)


class RabbitMQPipeline(TrafficPipeline):
    producer = RabbitMQProducer(
        queue="traffic", uri="amqp://replaced", lease=LEASE, on_failure="retry", retry=_RETRY
    )


class SqsPipeline(TrafficPipeline):
    producer = SqsProducer(
        queue_url="http://127.0.0.1:1/0/replaced",
        conn_id="traffic",
        lease=LEASE,
        wait_time_seconds=0,
        receive_interval=0.1,
        receive_concurrency=4,
        on_failure="retry",
        retry=_RETRY,
    )


class KafkaPipeline(TrafficPipeline):
    producer = KafkaProducer(
        group_id="replaced",
        topics=["replaced"],
        conn_id="traffic",
        offset_reset_policy="earliest",
        lease=LEASE,
        settings={"fetch.wait.max.ms": 50},
        on_failure="retry",
        retry=_RETRY,
    )


class PubSubPipeline(TrafficPipeline):
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
    "sqlite": SqlitePipeline,
    "rabbitmq": RabbitMQPipeline,
    "sqs": SqsPipeline,
    "kafka": KafkaPipeline,
    "pubsub": PubSubPipeline,
}
