"""The queues of one producer: holding queues, dead-letter queue, delay queues.

Each is declared when it is first needed.  It is relied on when it is old enough and has responded.
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
#: first second, loses the queue with messages that it has confirmed (tested).
_RELIABLE_AGE = 2.0
#: Seconds to wait for the response of a queue that may be dead.
_GET_TIMEOUT = 5.0
#: How often a queue that does not respond is redeclared on one connection.
_MAX_TRIES = 3


class StandingQueues:
    """The queues of one producer, their journal, and the target of its dead letters."""

    def __init__(self, options: RabbitMQOptions, journal: QueueJournal) -> None:
        self.names = QueueNames(options.queue)
        self.holding = HoldingQueues(self.names)
        self._options = options
        self.journal = journal
        #: Queue of ours → the reason why it would lose messages, as of the latest check.
        self._losses: dict[str, str] = {}
        self._checked_at = -math.inf
        #: Exchange → the error of publishing dead letters to it; empty without one.
        self._exchanges: dict[str, str] = {}
        #: The connection, and the queues that are relied on over it.
        self._connection: ConnectionThread | None = None
        self._reliable: set[str] = set()
        #: Queues to redeclare.  Kept across connections: a get from such a queue may end one.
        self._silent: set[str] = set()

    # -- declaring -----------------------------------------------------------------------------

    def ensure_held(self, connection: ConnectionThread, name: str) -> None:
        """Declares a holding queue."""
        self._ensure(connection, name, KEEPING)

    def ensure_dead(self, connection: ConnectionThread) -> None:
        """Declares the default dead-letter queue, if it is used."""
        if self._options.dead_letter is None:
            self._ensure(connection, self.names.dead, KEEPING)

    def ensure_delay(self, connection: ConnectionThread, step: int) -> str:
        """Declares the delay queue of a step of the ladder; returns its name."""
        name = self.names.delay(step)
        self._ensure(connection, name, self.names.delay_arguments(step))
        return name

    def _ensure(self, connection: ConnectionThread, name: str, arguments: dict[str, Any]) -> None:
        """Declares a queue, and waits until it may be relied on.

        :raises ProducerUnavailable: If the queue does not respond.
        """
        if connection is not self._connection:
            self._connection, self._reliable = connection, set()
        if name in self._reliable:
            return
        if connection.depth(name) is None:
            # Before declaring: another run must not mistake the new queue for the old one.
            self.journal.note_declared(name)
        _declare(connection, name, arguments)
        if not self.journal.relied(name):
            time.sleep(_RELIABLE_AGE)
            if name in self._silent or not _is_alive(connection, name):
                self._redeclare(connection, name, arguments)
            self.journal.note_relied(name)
        self._reliable.add(name)

    def _redeclare(
        self, connection: ConnectionThread, name: str, arguments: dict[str, Any]
    ) -> None:
        """Replaces a queue that has never responded since it was declared, and so has no messages.

        :raises ProducerUnavailable: If the queue may have messages, or the new one does not
            respond.  If the get ended the connection, the next connection replaces the queue
            without one.
        """
        for _ in range(_MAX_TRIES):
            # A run records that it relies on a queue before it does.  So a run of ours declared
            # this one, and then RabbitMQ died.
            if self.journal.relied(name) is not False:
                break
            log.warning("The queue %r was declared and never responded: it is redeclared.", name)
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
            " (rabbitmqctl delete_queue): the next run redeclares it"
        )

    # -- publishing ----------------------------------------------------------------------------

    def dead_for(self, route: bytes) -> tuple[str, str]:
        """Returns exchange and routing key for the dead letter of a message with ``route``."""
        place = self._options.dead_letter
        if place is None:
            return "", self.names.dead
        if isinstance(place, str):
            return "", place
        key = place.get("routing_key", split_route(route)[1])
        return str(place.get("exchange", "")), str(key)

    def prepare_dead(self, connection: ConnectionThread) -> None:
        """Checks that dead letters can be published.

        :raises ProducerError: If they cannot.
        """
        self.ensure_dead(connection)
        exchange, _ = self.dead_for(b"")
        if exchange:
            self._check_exchange(connection, exchange)

    def check_place(self, connection: ConnectionThread, exchange: str, routing_key: str) -> None:
        """Checks that a message published to this exchange and routing key is not lost.

        :raises ProducerError: If the exchange is missing, or a policy makes a queue of ours lose
            messages.
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
            reason, subject = "", f"the exchange {name!r} of dead letters"
            try:
                connection.call(subject, "exchange_declare", exchange=name, passive=True)
            except ProducerUnavailable:
                raise
            except ProducerError as error:
                reason = str(error)
            self._exchanges[name] = reason
        if self._exchanges[name]:
            raise ProducerError(self._exchanges[name])


def _declare(connection: ConnectionThread, name: str, arguments: dict[str, Any]) -> None:
    """Declares a durable queue, unless it exists.

    :raises ProducerError: If it exists with other arguments.
    """
    connection.call(
        f"the queue {name!r}", "queue_declare", queue=name, durable=True, arguments=arguments
    )


def _is_alive(connection: ConnectionThread, name: str) -> bool:
    """Whether a queue responds.  No message is taken from a queue that has some.

    The depth of a dead or slow queue is 0.  A get from it may end the connection.
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
