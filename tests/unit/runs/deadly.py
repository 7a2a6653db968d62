"""A pipeline of numbers, one of which ends its process.

Child processes import it by its name, many times over: so it imports no Airflow.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from airflow_broadway import Batcher, Message, Processors
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.producers.sqlite import SqliteProducer
from tests.unit.passing import Passing

#: Where the environment says which number ends its process, at which callback, and how.
NUMBER, PLACE, WAY = "DEADLY_NUMBER", "DEADLY_PLACE", "DEADLY_WAY"


def strike(place: str, message: Message) -> None:
    if os.environ.get(PLACE) != place or os.environ.get(NUMBER) != str(int(message.data)):
        return
    match os.environ.get(WAY):
        case "group":  # as where a whole container is ended
            os.killpg(0, signal.SIGKILL)
        case "hog":
            hoard = []
            while True:
                hoard.append(b"x" * 10_000_000)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case _:
            os._exit(9)


def transform(message: Message) -> Message:
    strike("transformer", message)
    return message


def partition(message: Message) -> int:
    strike("partition_by", message)
    return int(message.data)


class Deadly(Passing):
    """Fails no message by itself."""

    name = "Sums"
    producer: Any = SqliteProducer(
        queue="sums", path="/replaced", max_crashes=2, transformer=transform
    )
    processors = Processors(concurrency=1, max_demand=100)
    batchers = {"default": Batcher(engine="python", batch_size=1000, batch_timeout=None)}

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        for message in messages:
            strike("prepare_messages", message)
        return messages

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        strike("handle_message", message)
        return message.put_data(int(message.data))


class DeadlyPartitioned(Deadly):
    processors = Processors(concurrency=2, max_demand=100, partition_by=partition)


def max_crashes(producer: Producer, count: int) -> None:
    """Set an option of a producer that is frozen."""
    object.__setattr__(producer, "max_crashes", count)
