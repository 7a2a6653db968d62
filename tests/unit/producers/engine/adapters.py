"""The least adapters of the custody engine's port."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.producers.engine.port import (
    Answer,
    Broker,
    Contents,
    DeadLetterTarget,
    Hidden,
    Received,
    Refusal,
)


class Nothing:
    """A client that does nothing."""

    name = "q"

    def remove(self, receipts: Sequence[str]) -> Mapping[int, Refusal]:
        return {}

    def hide(self, entries: Sequence[Hidden]) -> Mapping[int, Refusal]:
        return {}

    def close(self) -> None:
        pass


class EmptyBroker(Broker[Nothing]):
    """A queue in which there is nothing; its requests have four entries."""

    service: ClassVar[str] = "Test"
    queue_word: ClassVar[str] = "test queue"
    max_hide: ClassVar[int] = 60
    max_batch: ClassVar[int] = 4
    kept_days: ClassVar[int] = 1

    def __init__(self, env: ProducerEnv) -> None:
        super().__init__(Producer(), env)

    def open(self) -> Nothing:
        return Nothing()

    @property
    def place(self) -> str:
        return "q"

    def receive(self, count: int) -> Answer:
        return Answer(0.0, ())

    def read(self, received: Received) -> Contents:
        raise AssertionError("no test of this adapter gets here")

    def dead_letter_target(self) -> DeadLetterTarget:
        raise AssertionError("no test of this adapter gets here")
