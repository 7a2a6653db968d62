"""Publishing by a settlement, at a broker that confirms only while waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.producers.rabbitmq.amqp.channels import Publisher
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Reply
from airflow_broadway.producers.rabbitmq.broker.holding_queues import QueueNames
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.settle.settlement import Outbox
from airflow_broadway.testing.clock import ManualClock

MIB = 1024 * 1024
DEAD = Verdict(Action.DEAD_LETTER, 0.0, "why", "process")
QUEUES = QueueNames("orders")


class Broker:
    """A connection, its only channel and the broker, which answers a waiting client.

    :param refuses: The routing keys to which nothing can be published.
    """

    def __init__(self, refuses: Iterable[str] = ()) -> None:
        self._refuses = set(refuses)
        self._answer: Callable[[Any], None] = lambda frame: None
        self._open: dict[int, tuple[str, int]] = {}
        #: Routing key and body of what was published, in order.
        self.published: list[tuple[str, bytes]] = []
        #: The most bytes that were waiting for their confirm.
        self.peak = 0
        self.connection = self
        self.number = 1
        self.blocked = False
        self.max_properties = 100_000
        frames = SimpleNamespace(on_return=lambda channel, function: None)
        self.raw = SimpleNamespace(frames=frames, basic_publish=self._publish)

    def channel(self) -> Broker:
        return self

    def post(self, function: Callable[[], None]) -> None:
        function()

    def ask(self, function: Callable[[Reply], None]) -> None:
        """Confirms publications until the reply is done."""
        reply = Reply()
        function(reply)
        while not reply.done():
            self._confirm()

    def await_reply(self, reply: Reply) -> None:
        pass

    def on_lost(self, function: Callable[..., None]) -> None:
        pass

    def call(self, name: str, *, ack_nack_callback: Callable[[Any], None]) -> None:
        self._answer = ack_nack_callback

    def _publish(
        self, exchange: str, routing_key: str, body: bytes, properties: Any, *, mandatory: bool
    ) -> None:
        self.published.append((routing_key, body))
        self._open[len(self.published)] = (routing_key, len(body))
        self.peak = max(self.peak, sum(size for _, size in self._open.values()))

    def _confirm(self) -> None:
        number = next(iter(self._open))
        routing_key, _ = self._open.pop(number)
        name = "Basic.Nack" if routing_key in self._refuses else "Basic.Ack"
        method = SimpleNamespace(NAME=name, delivery_tag=number, multiple=False)
        self._answer(SimpleNamespace(method=method))

    def publisher(self) -> Publisher:
        return Publisher(self)  # type: ignore[arg-type]


class StandingQueues:
    """The queues of ``orders``, all declared."""

    names = QUEUES
    journal = QueueJournal(None, "orders")

    def ensure_dead(self, connection: Any) -> None:
        pass

    def check_place(self, connection: Any, exchange: str, routing_key: str) -> None:
        pass

    def dead_for(self, route: bytes) -> tuple[str, str]:
        return "", QUEUES.dead


def outbox(broker: Broker) -> Outbox:
    clock = ManualClock()
    queues: Any = StandingQueues()
    connection: Any = broker
    outbox = Outbox(connection, queues, clock, "g", clock.now())
    outbox._publisher = broker.publisher()
    return outbox


def message(number: int, size: int) -> Held:
    return Held(f"m{number}", 1, False, b"\x00\x00", b"\x00\x00", bytes(size))


@pytest.mark.parametrize(
    ("count", "size", "low", "high"),
    [(100, MIB, 0, 17 * MIB), (10_000, 1, 1_000, 2_100)],
    ids=["by bytes", "by count"],
)
def test_unconfirmed_publishes_are_bounded(count, size, low, high):
    broker = Broker()
    publisher = broker.publisher()

    for number in range(count):
        publisher.publish("", "q", b"\x00\x00", bytes(size), key=str(number))

    assert publisher.flush() == {}
    assert len(broker.published) == count
    assert low < broker.peak <= high


def test_refused_publish_fails_alone():
    broker = Broker(refuses=[QUEUES.dead])
    box = outbox(broker)

    box.carry_out(message(1, 10), DEAD)
    box.carry_out(message(2, 10), RELEASE)

    assert list(box.finish()) == ["m1"]
    assert [routing_key for routing_key, _ in broker.published] == [QUEUES.dead, "orders"]


def test_message_without_room_for_retry_mark_is_dead_lettered():
    broker = Broker()
    broker.max_properties = 60
    box = outbox(broker)

    action = box.carry_out(message(1, 10), Verdict(Action.RETRY, 0.0, "later", "process"))

    assert action is Action.DEAD_LETTER
    assert box.finish() == {}
    assert [routing_key for routing_key, _ in broker.published] == [QUEUES.dead]
