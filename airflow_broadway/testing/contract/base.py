"""The base class of the suites: capabilities of a producer, and helpers for generations."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from airflow_broadway.core.custody.protocol import Custodian, Lease, Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.model.message import Message
from airflow_broadway.testing.harness import Harness, bodies, settlement_of


class ContractBase(ABC):
    """The settings of a suite, and helpers for sources and custodians."""

    #: Whether messages arrive in the order in which they were sent.
    keeps_order: ClassVar[bool] = True
    #: Whether the broker rejects requests for a lapsed lease.
    tells_lapse: ClassVar[bool] = True
    #: Whether a released message keeps its attempt.
    keeps_attempt: ClassVar[bool] = True
    #: Whether two runs may hold messages of one queue concurrently.
    shares: ClassVar[bool] = True
    #: Whether a redelivered message blocks no other.
    independent: ClassVar[bool] = True
    #: The number of messages in a settlement that is killed.
    many: ClassVar[int] = 3_000
    #: Bodies that the broker supports, including unusual ones.
    odd_bodies: ClassVar[Sequence[bytes]] = (
        b"",
        b"\x00\xff not UTF-8",
        "zażółć".encode(),
        b"x" * 100_000,
    )

    @pytest.fixture
    @abstractmethod
    def harness(self) -> Any:
        """Returns a harness with its own empty queue."""

    @contextmanager
    def source(self, harness: Harness, generation: str) -> Iterator[Source]:
        """Opens a source for ``generation``, and closes it at the end."""
        source = harness.producer().source(harness.env(generation))
        try:
            yield source
        finally:
            source.close()

    @contextmanager
    def custodian(self, harness: Harness) -> Iterator[Custodian]:
        """Opens a custodian as another process would, and closes it at the end."""
        custodian = harness.producer().custodian(harness.env("custodian"))
        try:
            yield custodian
        finally:
            custodian.close()

    def take(self, source: Source, demand: int = 100_000) -> list[Message]:
        """Receives and secures messages until ``demand`` is met or the queue is quiet."""
        taken: list[Message] = []
        while len(taken) < demand:
            messages = source.receive(min(500, demand - len(taken)), timeout=0.2)
            if not messages:
                break
            taken += source.secure(messages)
        return taken

    def hold(
        self, harness: Harness, generation: str, demand: int = 100_000
    ) -> tuple[Lease, list[Message]]:
        """Receives messages and closes the source, as a process task does."""
        with self.source(harness, generation) as source:
            messages = self.take(source, demand)
            messages += source.stop()
            return self.copied(source.lease), messages

    def send_and_hold(
        self, harness: Harness, count: int, generation: str = "g1"
    ) -> tuple[Lease, list[Message]]:
        """Sends messages, and receives them as :meth:`hold` does."""
        harness.send(bodies(count))
        return self.hold(harness, generation)

    def settle(self, harness: Harness, lease: Lease, settlement: Settlement) -> SettleReport:
        """Settles by a new custodian."""
        with self.custodian(harness) as custodian:
            return custodian.settle(lease, settlement)

    def need_independent(self) -> None:
        """Skips a test if redelivered messages block others."""
        if not self.independent:
            pytest.skip("a redelivered message blocks those behind it")

    def copied(self, lease: Lease) -> Lease:
        """Returns the lease as another process reads it."""
        return Lease.from_json(json.loads(json.dumps(lease.to_json())))

    def rest_of_queue(self, harness: Harness, generation: str = "the rest") -> list[Message]:
        """Receives and acknowledges all ready messages."""
        lease, messages = self.hold(harness, generation)
        self.settle(harness, lease, settlement_of(messages))
        return messages
