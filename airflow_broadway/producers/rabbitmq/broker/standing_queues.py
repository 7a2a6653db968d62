"""The queues of one producer: holding queues, dead letters, retries that wait.

Each is declared when it is first needed, and relied on when it is old enough and has answered.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.channels import Getter
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import MISSING, ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.wire import split_route
from airflow_broadway.producers.rabbitmq.broker.checks import CHECK_INTERVAL, losses
from airflow_broadway.producers.rabbitmq.broker.holding_queues import (
    KEEPING,
    HoldingQueues,
    QueueNames,
)
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

log = logging.getLogger(__name__)

#: Seconds from declaring a quorum queue until it is relied on.  RabbitMQ 3.10, killed within the
#: first second, forgets that it has the queue, and with it messages that it has confirmed (probed).
_RELIABLE_AGE = 2.0
#: Seconds that a queue which may be dead may take to answer.
_GET_TIMEOUT = 5.0
#: How often a queue that does not answer is declared anew on one connection.
_MAX_TRIES = 3


class StandingQueues:
    """The queues of one producer, their journal, and where its dead letters go."""

    def __init__(self, options: RabbitMQOptions, journal: QueueJournal) -> None:
        self.names = QueueNames(options.queue)
        self.holding = HoldingQueues(self.names)
        self._options = options
        self.journal = journal
        #: The queues of ours that would lose messages, and why, as of the latest check.
        self._losses: dict[str, str] = {}
        self._checked_at = -math.inf
        #: Exchange → why it cannot take dead letters; empty if it can.
        self._exchanges: dict[str, str] = {}
        #: The connection, and the queues that are relied on over it.
        self._connection: ConnectionThread | None = None
        self._reliable: set[str] = set()
        #: Queues to be declared anew.  Kept over connections: asking such a queue may end one.
        self._silent: set[str] = set()

    # -- declared when they are needed ---------------------------------------------------------

    def ensure_held(self, connection: ConnectionThread, name: str) -> None:
        """Declares a holding queue."""
        self._ensure(connection, name, KEEPING)

    def ensure_dead(self, connection: ConnectionThread) -> None:
        """Declares the dead-letter queue, if it is ours."""
        if self._options.dead_letter is None:
            self._ensure(connection, self.names.dead, KEEPING)

    def ensure_delay(self, connection: ConnectionThread, step: int) -> str:
        """Declares a step of the delay ladder; returns its name."""
        name = self.names.delay(step)
        self._ensure(connection, name, self.names.delay_arguments(step))
        return name

    def _ensure(self, connection: ConnectionThread, name: str, arguments: dict[str, Any]) -> None:
        """Declares a queue, and waits until it may be relied on.

        :raises ProducerUnavailable: If it does not answer.
        """
        if connection is not self._connection:
            self._connection, self._reliable = connection, set()
        if name in self._reliable:
            return
        if connection.depth(name) is None:
            # Before it is there again: a run that finds it must not take it for the old one.
            self.journal.note_declared(name)
        _declare(connection, name, arguments)
        if not self.journal.relied(name):
            time.sleep(_RELIABLE_AGE)
            if name in self._silent or not _is_alive(connection, name):
                self._declare_anew(connection, name, arguments)
            self.journal.note_relied(name)
        self._reliable.add(name)

    def _declare_anew(
        self, connection: ConnectionThread, name: str, arguments: dict[str, Any]
    ) -> None:
        """Replaces a queue that never answered since it was declared, and so holds nothing.

        :raises ProducerUnavailable: If it may hold something, or does not answer either.  If asking
            it ended the connection, the next connection replaces it unasked.
        """
        for _ in range(_MAX_TRIES):
            # A run notes that it relies on a queue before it does: this one was declared by a run
            # of ours, and then RabbitMQ died.
            if self.journal.relied(name) is not False:
                break
            log.warning("The queue %r was declared, and never answered: it is made anew.", name)
            self._silent.add(name)
            connection.call(f"the queue {name!r}", "queue_delete", accepts=MISSING, queue=name)
            _declare(connection, name, arguments)
            self._silent.discard(name)
            time.sleep(_RELIABLE_AGE)
            if _is_alive(connection, name):
                return
        raise ProducerUnavailable(
            f"the queue {name!r} does not answer: RabbitMQ may have died right after it was"
            " declared; look at its log, and if the queue stays so and holds nothing, delete it"
            " (rabbitmqctl delete_queue): the next run declares it anew"
        )

    # -- where messages go ---------------------------------------------------------------------

    def dead_for(self, route: bytes) -> tuple[str, str]:
        """Exchange and routing key of the dead letter of a message that came by ``route``."""
        place = self._options.dead_letter
        if place is None:
            return "", self.names.dead
        if isinstance(place, str):
            return "", place
        key = place.get("routing_key", split_route(route)[1])
        return str(place.get("exchange", "")), str(key)

    def prepare_dead(self, connection: ConnectionThread) -> None:
        """Sees that dead letters can be published.

        :raises ProducerError: If they cannot.
        """
        self.ensure_dead(connection)
        exchange, _ = self.dead_for(b"")
        if exchange:
            self._check_exchange(connection, exchange)

    def check_place(self, connection: ConnectionThread, exchange: str, routing_key: str) -> None:
        """Sees that a message is not lost that is published there.

        :raises ProducerError: If the exchange is missing, or a policy makes the broker lose what
            goes into a queue of ours.
        """
        if exchange:
            self._check_exchange(connection, exchange)
            return
        if time.monotonic() - self._checked_at > CHECK_INTERVAL:
            self._losses = losses(connection.address, self._options)
            self._checked_at = time.monotonic()
        if routing_key in self._losses:
            raise ProducerError(self._losses[routing_key])

    def _check_exchange(self, connection: ConnectionThread, name: str) -> None:
        if name not in self._exchanges:
            why, what = "", f"the exchange {name!r} of dead letters"
            try:
                connection.call(what, "exchange_declare", exchange=name, passive=True)
            except ProducerUnavailable:
                raise
            except ProducerError as error:
                why = str(error)
            self._exchanges[name] = why
        if self._exchanges[name]:
            raise ProducerError(self._exchanges[name])


def _declare(connection: ConnectionThread, name: str, arguments: dict[str, Any]) -> None:
    """Declares a queue that is there already, or is to be kept.

    :raises ProducerError: If it is there with other arguments.
    """
    connection.call(
        f"the queue {name!r}", "queue_declare", queue=name, durable=True, arguments=arguments
    )


def _is_alive(connection: ConnectionThread, name: str) -> bool:
    """Whether a queue answers; one that has messages and may not give them up is not asked.

    One that is dead, or slow to answer, has a depth too: 0.  The connection may be lost by asking.
    """
    depth = connection.depth(name)
    if depth != 0:
        return depth is not None
    try:
        getter = Getter(connection, name)
        getter.get(_GET_TIMEOUT)
    except ProducerUnavailable:
        return False
    getter.close()
    return True
