"""A queue per test at the tests' RabbitMQ, with its operations."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease, Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Verdict
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.properties import decode
from airflow_broadway.producers.rabbitmq.broker.holding_queues import QueueNames
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.marks import Mark, republished
from airflow_broadway.testing.contract import settlement_of
from tests.faults.proxy import Relay
from tests.rabbitmq_server import RabbitServer

__all__ = ["PASSWORD", "Breaker", "Connections", "Place", "manage", "marked", "permitted"]

#: The password of every user of the tests, which no text may contain.
PASSWORD = "s3cret-of-the-rabbit"


def marked(
    body: bytes, message_id: str, *, attempt: int = 1, giver: str = "another"
) -> dict[str, Any]:
    """Returns the headers of a message without properties that a run released."""
    held = Held(message_id, attempt, False, b"\x00\x00", b"\x00\x00", body)
    return dict(decode(republished(held, Mark(message_id, giver, attempt)))["headers"])


class Connections:
    """One connection under every id."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def get(self, conn_id: str) -> Connection:
        return Connection(conn_id=conn_id, conn_type="rabbitmq", **self._fields)


class Place:
    """The queue of one test."""

    def __init__(self, server: RabbitServer, folder: Path) -> None:
        self.server = server
        self.host, self.port = server.address
        self.name = f"test-{uuid.uuid4().hex}"
        self.queues = QueueNames(self.name)
        self.folder = folder

        self.channel, self.get = server.channel, server.get
        self.count, self.depth = server.count, server.depth

    def declare(self, **arguments: Any) -> None:
        self.server.declare(self.name, **arguments)

    def send(self, *bodies: bytes, properties: Any = None) -> None:
        with self.channel() as channel:
            channel.confirm_delivery()
            for body in bodies:
                channel.basic_publish("", self.name, body, properties)

    def producer(self, **options: Any) -> RabbitMQProducer:
        return RabbitMQProducer(**{"queue": self.name, "uri": self.server.uri, **options})

    def env(self, generation: str = "g1", **connection: Any) -> ProducerEnv:
        fields = {"host": self.host, "port": self.port, **connection}
        return ProducerEnv(
            generation=generation,
            connections=Connections(**fields),
            staging=f"file://{self.folder}",
        )

    @contextmanager
    def source(self, generation: str = "g1", **options: Any) -> Iterator[Source]:
        source = self.producer(**options).source(self.env(generation))
        try:
            yield source
        finally:
            source.close()

    def take(self, source: Source) -> list[Message]:
        """Receives until the queue is empty."""
        taken: list[Message] = []
        while received := source.secure(source.receive(500, timeout=0.0)):
            taken += received
        return taken

    def hold(self, generation: str = "g1", **options: Any) -> tuple[list[Message], Lease]:
        """Receives all messages, as a run that settles later."""
        with self.source(generation, **options) as source:
            messages = [*self.take(source), *source.stop()]
            return messages, source.lease

    def settle(
        self, generation: str, verdicts: Mapping[int, Verdict] | None = None, **options: Any
    ) -> tuple[list[Message], SettleReport]:
        """Receives all messages, and settles them by their position."""
        messages, lease = self.hold(generation, **options)
        by_id = {messages[index].message_id: v for index, v in (verdicts or {}).items()}
        return messages, self.carry_out(lease, settlement_of(messages, by_id), **options)

    def standing_queues(self, **options: Any) -> StandingQueues:
        """Returns the standing queues."""
        journal = QueueJournal(self.env().staging, self.name)
        return StandingQueues(self.producer(**options), journal)

    def carry_out(self, lease: Lease, settlement: Settlement, /, **options: Any) -> SettleReport:
        """Settles a lease."""
        custodian = self.producer(**options).custodian(self.env("custodian"))
        try:
            return custodian.settle(lease, settlement)
        finally:
            custodian.close()

    def send_released(self, *bodies: bytes, properties: Any = None) -> list[Message]:
        """Sends messages that a run receives and releases; returns them."""
        self.send(*bodies, properties=properties)
        messages, lease = self.hold("before")
        assert self.carry_out(lease, Settlement(rest=RELEASE)).released == len(bodies)
        return messages

    def first(self, queue: str) -> tuple[Any, bytes]:
        """Receives the first message of a queue, which must have one."""
        message = self.server.get(queue)
        assert message is not None
        return message


def manage(server: RabbitServer, method: str, path: str, body: Any = None) -> Any:
    """Calls the management API."""
    if server.given is not None:
        pytest.skip("no management API of the tests' own")
    return server.manage(method, path, body)


@contextmanager
def permitted(server: RabbitServer, *, tags: str = "", **allowed: str) -> Iterator[dict[str, str]]:
    """Creates a user with these permissions; yields its fields of a connection.

    :param allowed: ``configure``, ``write`` and ``read``; by default everything.
    """
    user = f"user-{uuid.uuid4().hex[:8]}"
    manage(server, "PUT", f"users/{user}", {"password": PASSWORD, "tags": tags})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    manage(server, "PUT", f"permissions/%2F/{user}", {**everything, **allowed})
    try:
        yield {"login": user, "password": PASSWORD}
    finally:
        manage(server, "DELETE", f"users/{user}")


class Breaker(Relay):
    """Between a client and its broker: breaks or pauses a connection at certain bytes.

    :param delay: Seconds of latency in each direction.
    """

    def __init__(self, target: tuple[str, int], delay: float = 0.0, port: int = 0) -> None:
        self._delay = delay
        self._awaited: bytes | None = None
        self._times: float = 0
        self._paused_at: bytes | None = None
        self._answer = False
        self._flowing = threading.Event()
        #: The number of broken connections.
        self.broken = 0
        #: Set once a client is paused.
        self.holds = threading.Event()
        super().__init__(target, port=port)

    def __exit__(self, *_: object) -> None:
        self.release()
        self.close()

    @property
    def uri(self) -> str:
        """The address for clients."""
        return f"amqp://127.0.0.1:{self.port}"

    def arm(self, at: bytes = b"", *, times: float = 1) -> None:
        """Breaks a connection when its client sends ``at``, which does not reach the broker.

        :param times: How many connections.
        """
        self._awaited, self._times = at, times

    def hold(self, at: bytes, *, answer: bool = False) -> None:
        """Pauses a connection at ``at`` until :meth:`release`.

        :param answer: Whether the broker sends it to a client.
        """
        self._paused_at, self._answer = at, answer
        self._flowing.clear()
        self.holds.clear()

    def release(self) -> None:
        """Resumes paused connections."""
        self._paused_at = None
        self._flowing.set()

    def _relay(self, client: socket.socket, broker: socket.socket) -> None:
        for source, target in ((client, broker), (broker, client)):
            pump = threading.Thread(target=self._pump, args=(source, target, source is client))
            pump.daemon = True
            pump.start()

    def _pump(self, source: socket.socket, target: socket.socket, of_client: bool) -> None:
        try:
            while data := source.recv(65536):
                if of_client and self._awaited is not None and self._awaited in data:
                    self._times -= 1
                    self._awaited = self._awaited if self._times else None
                    self.broken += 1
                    break
                if (
                    of_client != self._answer
                    and self._paused_at is not None
                    and self._paused_at in data
                ):
                    self.holds.set()
                    self._flowing.wait(60)
                time.sleep(self._delay)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        source.close()
