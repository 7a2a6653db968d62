"""The pipelines whose every point is struck: small, and each with something of its own.

The body of a message is its number.  What becomes of it is told by the number alone.
"""

from __future__ import annotations

from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, RetryPolicy
from airflow_broadway.producers.sqlite import SqliteProducer

__all__ = ["PIPELINES"]

_PRODUCER = SqliteProducer(queue="crashes", path="/given", retry=RetryPolicy(max_attempts=2))


class Batches(Broadway):
    """One batcher; some messages fail in each stage, and die at their second attempt."""

    producer = _PRODUCER
    processors = Processors(concurrency=1, max_demand=4)
    batchers = {"default": Batcher(engine="python", batch_size=4, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = message.put_data(int(message.data))
        return message.failed("seven") if message.data % 7 == 3 else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        return [each.failed("five") if each.data % 5 == 2 else each for each in messages]


class TwoBatchers(Batches):
    """Two batchers, one of them with keys, and two producers."""

    producer = SqliteProducer(
        queue="crashes", path="/given", retry=RetryPolicy(max_attempts=1), concurrency=2
    )
    batchers = {
        "even": Batcher(engine="python", batch_size=3, batch_timeout=None),
        "odd": Batcher(engine="python", batch_size=2, batch_timeout=None),
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = super().handle_message(processor, message, context)
        if message.data % 2 == 0:
            return message.put_batcher("even")
        return message.put_batcher("odd").put_batch_key(str(message.data % 3))


class NoBatchers(Broadway):
    """Processors only: what they return is the outcome."""

    producer = _PRODUCER
    processors = Processors(concurrency=1, max_demand=4)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("seven") if int(message.data) % 7 == 3 else message


PIPELINES: dict[str, type[Broadway]] = {
    "batches": Batches,
    "two batchers": TwoBatchers,
    "no batchers": NoBatchers,
}
