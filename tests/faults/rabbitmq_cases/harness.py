"""The test harness of RabbitMQ's custody cases."""

from __future__ import annotations

import time
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
from tests.faults.case_result import CaseResult
from tests.rabbitmq_server import RabbitServer


class QueueHarness:
    """The queue of one case, and the states of its messages, which are numbers.

    Opens and settles generations like a run, one call at a time, so that a case can inject a fault
    between two calls.

    :param server: The server; a case with ``kills_server`` may kill it.
    :param folder: The case's folder.
    """

    def __init__(self, server: RabbitServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.channel, self.count = server.channel, server.count
        self.queue = f"faults-{uuid.uuid4().hex}"
        self.queues = QueueNames(self.queue)
        self.producer = self.make_producer()
        self._received: dict[tuple[int, int], list[bool]] = defaultdict(list)
        self._settled: set[int] = set()

    def make_producer(
        self, *, lease: float = 30.0, reconnect_timeout: float = 5.0
    ) -> RabbitMQProducer:
        """Creates a producer of the queue; ``lease`` in seconds."""
        return RabbitMQProducer(
            queue=self.queue,
            uri=self.server.uri,
            lease=lease,
            reconnect_timeout=reconnect_timeout,
            on_failure="retry",
        )

    # -- queues --------------------------------------------------------------------------------

    def fill(self, count: int, *, kind: str = "classic", **arguments: Any) -> None:
        """Declares the queue and publishes the numbers below ``count``."""
        self.server.declare(self.queue, **{"x-queue-type": kind, **arguments})
        self.send(range(count))

    def send(self, numbers: range) -> None:
        """Publishes numbers to the empty queue and waits until they are ready."""
        self.server.fill(self.queue, (b"%d" % number for number in numbers))

    def delete(self, queue: str) -> None:
        """Deletes a queue with its messages."""
        with self.channel() as channel:
            channel.queue_delete(queue)

    # -- generations ---------------------------------------------------------------------------

    def env(self, generation: str) -> ProducerEnv:
        return ProducerEnv(generation=generation, staging=f"file://{self.folder}")

    def source(self, generation: str) -> Source:
        return self.producer.source(self.env(generation))

    def holding_queue(self, generation: str) -> str:
        """Returns the name of the generation's holding queue."""
        opened = QueueJournal(f"file://{self.folder}", self.queue).opened(generation)
        assert opened is not None
        return opened

    def holding_queues(self) -> list[str]:
        """Lists the queue's holding queues, including empty ones."""
        return self.server.queue_names(f"broadway.held.{self.queue}")

    def receive_all(
        self, source: Source, most: int = 100_000, *, patience: float = 0.0
    ) -> list[Message]:
        """Receives until the queue is empty, or ``most`` messages are received.

        :param patience: Seconds to wait for the first message.
        """
        taken: list[Message] = []
        deadline = time.monotonic() + patience
        while len(taken) < most:
            got = self.receive(source, min(1000, most - len(taken)))
            if not got and (taken or time.monotonic() >= deadline):
                break
            taken += got
        return taken

    def receive(self, source: Source, demand: int = 1000) -> list[Message]:
        """Calls ``receive`` once and secures the messages."""
        return self._record(source.secure(source.receive(demand, timeout=1.0)))

    def _record(self, messages: Sequence[Message]) -> list[Message]:
        for message in messages:
            self._received[int(message.data), message.attempt].append(message.redelivered)
        return list(messages)

    def receive_run(
        self, generation: str, most: int = 100_000, *, patience: float = 0.0
    ) -> tuple[Lease, list[Message]]:
        """Receives like a process task that succeeds; returns the lease and the messages."""
        source = self.source(generation)
        try:
            messages = self.receive_all(source, most, patience=patience)
            messages += self._record(source.stop())
            return source.lease, messages
        finally:
            source.close()

    def initial_lease(self, generation: str) -> Lease:
        """Returns the lease as it is before the first receive, which is what a sweep reads."""
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
        """Settles these messages; those without a verdict are acknowledged."""
        verdicts = verdicts or {}
        report = self.settle(lease, settlement_of(messages, dict(verdicts)))
        assert not report.lapsed, report
        for message in messages:
            action = verdicts.get(message.message_id, ACK).action
            if action in (Action.ACK, Action.DEAD_LETTER):
                self._settled.add(int(message.data))
        return report

    def drain(self) -> list[int]:
        """Receives and acknowledges all messages; returns their numbers, sorted."""
        numbers: list[int] = []
        while True:
            lease, messages = self.receive_run(uuid.uuid4().hex)
            if not messages:
                return sorted(numbers)
            numbers += [int(message.data) for message in messages]
            self.settle_all(lease, messages)

    def dead_numbers(self) -> set[int]:
        """Returns the numbers of the dead letters."""
        return {letter.number for letter in dead_letters(self.server, self.queues.dead)}

    # -- result --------------------------------------------------------------------------------

    def result(self, case: str, count: int, *, broker_kills: int = 0) -> CaseResult:
        """Returns the final states of the numbers below ``count``."""
        result = CaseResult(f"rabbitmq.{case}", count)
        if broker_kills:
            result.killed["broker"] = broker_kills
        result.lost = [number for number in range(count) if number not in self._settled]
        delays = [self.queues.delay(step) for step in LADDER]
        for name in (self.queue, *delays, *self.holding_queues()):
            if left := self.count(name):
                result.mistakes.append(f"{left} messages are left in {name}")
        copies: dict[int, list[bool]] = defaultdict(list)
        for letter in dead_letters(self.server, self.queues.dead):
            copies[letter.number].append(letter.marked)
        for marks in (*self._received.values(), *copies.values()):
            result.duplicates += len(marks) - 1
            result.unmarked += max(0, marks.count(False) - 1)
        return result
