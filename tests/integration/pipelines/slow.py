"""Slow pipelines; without Airflow, so that a processor's process starts soon."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, ClassVar

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.producers.sqlite import SqliteProducer

DELAY = 0.05


class Slow(Broadway):
    """One chunk would take ten seconds."""

    name = "slow"
    producer = SqliteProducer(queue="slow", path="/replaced")
    processors = Processors(concurrency=1, max_demand=400)
    batchers = {"default": Batcher(engine="python", batch_size=10, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        time.sleep(DELAY)
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class SlowThreads(Slow):
    processors = Processors(concurrency=4, max_demand=100)


class SlowProcesses(Slow):
    processors = Processors(concurrency=2, max_demand=200, executor="processes")


def outlast_the_task() -> None:
    """Exceeds the task's ``execution_timeout``, which ends immediately."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(60.0)


class QuickMessages(Slow):
    """Only its batches take time."""

    #: The batches that were handled to their end, in this process.
    handled: ClassVar[list[str]] = []

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        self.handled.append(batch_info.batch_id)
        return messages


class ThirdBatchHangs(QuickMessages):
    """The third batch takes longer than any task may."""

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        if len(self.handled) == 2:
            outlast_the_task()
        return super().handle_batch(batcher, messages, batch_info, context)


class FirstBatchSeesKill(QuickMessages):
    """Its task is killed during the first batch, which ends a while later."""

    #: Set once the task has received the signal.
    killed: ClassVar = threading.Event()

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        assert self.killed.wait(30)
        time.sleep(0.2)
        return super().handle_batch(batcher, messages, batch_info, context)


class OneHangs(Slow):
    """The message 30 takes longer than any task may."""

    processors = Processors(concurrency=1, max_demand=10)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data == b"30":
            outlast_the_task()
        return message


class SlowHangs(Slow):
    processors = Processors(concurrency=2, max_demand=10)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        time.sleep(30.0 if message.data == b"13" else 0.01)
        return message
