"""Queues that stay are relied on once they answer, and made anew only if they hold nothing."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker import queue_calls
from airflow_broadway.producers.rabbitmq.broker.names import QueueNames
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.journal import QueueJournal

NAMES = QueueNames("q")


class Connection:
    """One that lasts until a queue without a process is asked for something."""

    def __init__(self) -> None:
        self.lost = False


class Broker:
    """What its queues say; each silent one ends the connection that asks it."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.there: set[str] = set()
        self.deleted: list[str] = []

    def depth(self, connection: Connection, name: str) -> int | None:
        self._check(connection)
        return 0 if name in self.there else None

    def is_empty(self, connection: Connection, name: str) -> bool | None:
        self._check(connection)
        if name in self.silent:
            connection.lost = True
            return None
        return True

    def declare(self, connection: Connection, name: str, arguments: dict[str, Any]) -> None:
        self._check(connection)
        self.there.add(name)

    def delete(self, connection: Connection, name: str) -> int:
        self._check(connection)
        self.deleted.append(name)
        self.silent.discard(name)
        return 0

    def _check(self, connection: Connection) -> None:
        if connection.lost:
            raise ProducerUnavailable("the connection is lost")


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    """One that died right after it had declared the queue of dead letters."""
    made = Broker()
    made.there.add(NAMES.dead)
    made.silent.add(NAMES.dead)
    for name in ("depth", "is_empty", "declare", "delete"):
        monkeypatch.setattr(queue_calls, name, getattr(made, name))
    monkeypatch.setattr(queue_calls, "_RELIABLE_AGE", 0.0)
    return made


@pytest.fixture
def journal() -> QueueJournal:
    made = QueueJournal(None, "q")
    made.note_declared(NAMES.dead)
    return made


def ensure(standing: StandingQueues) -> None:
    connection: Any = Connection()
    standing.ensure_dead(connection)


@pytest.fixture
def standing(broker: Broker, journal: QueueJournal) -> StandingQueues:
    """Has asked the queue once, and lost a connection by it."""
    made = StandingQueues(RabbitMQProducer(queue="q"), journal, NAMES)
    with pytest.raises(ProducerUnavailable):
        ensure(made)
    return made


def test_one_that_ended_a_connection_is_made_anew_on_the_next_unasked(
    broker: Broker, journal: QueueJournal, standing: StandingQueues
) -> None:
    ensure(standing)

    assert broker.deleted == [NAMES.dead]
    assert journal.relied(NAMES.dead)


def test_one_that_another_run_has_made_anew_meanwhile_is_used_as_it_is(
    broker: Broker, journal: QueueJournal, standing: StandingQueues
) -> None:
    # Given another run that made the queue anew and relies on it: it may hold something
    broker.silent.clear()
    journal.note_relied(NAMES.dead)

    ensure(standing)

    assert broker.deleted == []
