"""Pipelines that take their time; without Airflow, so that a processor's process starts soon."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.producers.sqlite import SqliteProducer

EACH = 0.05


class Slow(Broadway):
    """One chunk would take ten seconds."""

    name = "slow"
    producer = SqliteProducer(queue="slow", path="/replaced")
    processors = Processors(concurrency=1, max_demand=400)
    batchers = {"default": Batcher(engine="python", batch_size=10, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        time.sleep(EACH)
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class SlowThreads(Slow):
    processors = Processors(concurrency=4, max_demand=100)


class SlowProcesses(Slow):
    processors = Processors(concurrency=2, max_demand=200, executor="processes")


class SlowBatches(Slow):
    """Messages are quick, batches take a second each."""

    #: The batches that were handled to their end, in this process.
    handled: ClassVar[list[str]] = []

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        time.sleep(1.0)
        self.handled.append(batch_info.batch_id)
        return messages


class OneHangs(Slow):
    """The message 30 takes longer than any task may."""

    processors = Processors(concurrency=1, max_demand=10)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        time.sleep(60.0 if message.data == b"30" else 0.001)
        return message


class SlowHangs(Slow):
    processors = Processors(concurrency=2, max_demand=10)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        time.sleep(30.0 if message.data == b"13" else 0.01)
        return message
