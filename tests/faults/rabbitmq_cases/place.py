"""The place of a RabbitMQ case: a server, a queue of its own, generations by hand."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease, Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, Action, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker.holding_queues import LADDER, QueueNames
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.testing.contract import settlement_of
from tests.faults.brokers_rabbitmq import dead_letters
from tests.faults.found import Found
from tests.rabbitmq_server import RabbitServer


class Place:
    """One case's queue, and what became of the numbers in it.

    Generations are opened and settled here as a run would, one call at a time, so that a fault can
    come between any two.

    :param server: Where the queue is; a case that is ``mortal`` may kill it.
    :param folder: The case's own.
    """

    def __init__(self, server: RabbitServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.channel, self.count = server.channel, server.count
        self.queue = f"faults-{uuid.uuid4().hex}"
        self.queues = QueueNames(self.queue)
        self.producer = self.producer_of()
        self._taken: dict[tuple[int, int], list[bool]] = defaultdict(list)
        self._done: set[int] = set()

    def producer_of(
        self, *, lease: float = 30.0, reconnect_timeout: float = 5.0
    ) -> RabbitMQProducer:
        """A producer of the queue; ``lease`` in seconds."""
        return RabbitMQProducer(
            queue=self.queue,
            uri=self.server.uri,
            lease=lease,
            reconnect_timeout=reconnect_timeout,
            on_failure="retry",
        )

    # -- queues --------------------------------------------------------------------------------

    def fill(self, count: int, *, kind: str = "classic", **arguments: Any) -> None:
        """Declares the queue with the numbers below ``count`` in it."""
        self.server.declare(self.queue, **{"x-queue-type": kind, **arguments})
        self.send(range(count))

    def send(self, numbers: range) -> None:
        """Publishes numbers to the queue, which is empty, and waits until they are there."""
        self.server.fill(self.queue, (b"%d" % number for number in numbers))

    def delete(self, queue: str) -> None:
        """Deletes a queue with what is in it."""
        with self.channel() as channel:
            channel.queue_delete(queue)

    # -- generations ---------------------------------------------------------------------------

    def env(self, generation: str) -> ProducerEnv:
        return ProducerEnv(generation=generation, staging=f"file://{self.folder}")

    def source(self, generation: str) -> Source:
        return self.producer.source(self.env(generation))

    def holding_queue(self, generation: str) -> str:
        """Its name, once the generation has one."""
        opened = QueueJournal(f"file://{self.folder}", self.queue).opened(generation)
        assert opened is not None
        return opened

    def holding_queues(self) -> list[str]:
        """All holding queues of the queue, empty ones too."""
        return self.server.queue_names(f"broadway.held.{self.queue}")

    def take(self, source: Source, most: int = 100_000) -> list[Message]:
        """Receives until the queue is quiet, or so many."""
        taken: list[Message] = []
        while len(taken) < most:
            got = self.receive(source, min(1000, most - len(taken)))
            if not got:
                break
            taken += got
        return taken

    def receive(self, source: Source, demand: int = 1000) -> list[Message]:
        """One call of ``receive``, secured."""
        return self._noted(source.secure(source.receive(demand, timeout=1.0)))

    def _noted(self, messages: Sequence[Message]) -> list[Message]:
        for message in messages:
            self._taken[int(message.data), message.attempt].append(message.redelivered)
        return list(messages)

    def hold(self, generation: str, most: int = 100_000) -> tuple[Lease, list[Message]]:
        """Receives as a process task that publishes its manifest; returns lease and messages."""
        source = self.source(generation)
        try:
            messages = self.take(source, most)
            messages += self._noted(source.stop())
            return source.lease, messages
        finally:
            source.close()

    def release_lease(self, generation: str) -> Lease:
        """The lease as a sweep knows it: as it was before the first receive."""
        source = self.source(generation)
        lease = source.lease
        source.close()
        return lease

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        custodian = self.producer.custodian(self.env(lease.generation))
        try:
            return custodian.settle(lease, settlement)
        finally:
            custodian.close()

    def settle_all(
        self, lease: Lease, messages: list[Message], verdicts: Mapping[str, Verdict] | None = None
    ) -> SettleReport:
        """Settles by a manifest: what is named no verdict is acknowledged."""
        verdicts = verdicts or {}
        report = self.settle(lease, settlement_of(messages, dict(verdicts)))
        assert not report.lapsed, report
        for message in messages:
            action = verdicts.get(message.message_id, ACK).action
            if action in (Action.ACK, Action.DEAD_LETTER):
                self._done.add(int(message.data))
        return report

    def rest(self) -> list[int]:
        """Handles all that can still be received; in order of number."""
        numbers: list[int] = []
        while True:
            lease, messages = self.hold(uuid.uuid4().hex)
            if not messages:
                return sorted(numbers)
            numbers += [int(message.data) for message in messages]
            self.settle_all(lease, messages)

    def dead_numbers(self) -> set[int]:
        """The dead letters."""
        return {letter.number for letter in dead_letters(self.server, self.queues.dead)}

    # -- the end -------------------------------------------------------------------------------

    def found(self, case: str, count: int) -> Found:
        """Accounts for the numbers below ``count``, all handled by generations by hand."""
        result = Found(f"rabbitmq.{case}", count)
        result.lost = [number for number in range(count) if number not in self._done]
        delays = [self.queues.delay(step) for step in LADDER]
        for name in (self.queue, *delays, *self.holding_queues()):
            if left := self.count(name):
                result.mistakes.append(f"{left} messages are left in {name}")
        copies: dict[int, list[bool]] = defaultdict(list)
        for letter in dead_letters(self.server, self.queues.dead):
            copies[letter.number].append(letter.marked)
        for marks in (*self._taken.values(), *copies.values()):
            result.duplicates += len(marks) - 1
            result.unmarked += max(0, marks.count(False) - 1)
        return result
