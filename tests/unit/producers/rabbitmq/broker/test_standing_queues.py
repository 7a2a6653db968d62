"""Standing queues are relied on once they answer, and redeclared only if empty."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.producers.rabbitmq.broker.holding_queues import QueueNames
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.journal import QueueJournal

NAMES = QueueNames("q")


class Broker:
    """Its queues; a silent one closes the connection that uses it."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.declared: set[str] = set()
        self.deleted: list[str] = []


class Connection:
    """A connection that is closed by a queue without a process."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lost = False

    def depth(self, name: str) -> int | None:
        self._check()
        return 0 if name in self._broker.declared else None

    def call(self, what: str, method: str, *, queue: str, **arguments: Any) -> None:
        self._check()
        if method == "queue_declare":
            self._broker.declared.add(queue)
        else:
            assert method == "queue_delete"
            self._broker.deleted.append(queue)
            self._broker.silent.discard(queue)

    def get(self, name: str) -> None:
        self._check()
        if name in self._broker.silent:
            self._lost = True
            self._check()

    def _check(self) -> None:
        if self._lost:
            raise ProducerUnavailable("the connection is lost")


class Getter:
    """A channel that gets messages from a queue."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection, self._name = connection, name

    def get(self, seconds: float) -> None:
        self._connection.get(self._name)

    def close(self) -> None:
        pass


@pytest.fixture
def broker(monkeypatch):
    """A broker that died right after declaring the dead-letter queue."""
    broker = Broker()
    broker.declared.add(NAMES.dead)
    broker.silent.add(NAMES.dead)
    monkeypatch.setattr(standing_queues, "Getter", Getter)
    monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 0.0)
    return broker


@pytest.fixture
def journal():
    journal = QueueJournal(None, "q")
    journal.note_declared(NAMES.dead)
    return journal


def ensure(standing: StandingQueues, broker: Broker) -> None:
    connection: Any = Connection(broker)
    standing.ensure_dead(connection)


@pytest.fixture
def standing(broker, journal):
    """Used the queue once, and lost a connection by it."""
    standing = StandingQueues(RabbitMQProducer(queue="q"), journal)
    with pytest.raises(ProducerUnavailable):
        ensure(standing, broker)
    return standing


def test_queue_that_closed_connection_is_redeclared(broker, journal, standing):
    ensure(standing, broker)

    assert broker.deleted == [NAMES.dead]
    assert journal.relied(NAMES.dead)


def test_queue_redeclared_by_another_run_is_reused(broker, journal, standing):
    # Given another run that redeclared the queue and relies on it: it may hold messages
    broker.silent.clear()
    journal.note_relied(NAMES.dead)

    ensure(standing, broker)

    assert broker.deleted == []
