"""The queues of our own that stay: holding queues, dead letters, retries that wait.

Each is declared when it is first needed, and relied on when it is old enough and has answered.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker import queue_calls
from airflow_broadway.producers.rabbitmq.broker.names import KEEPING, QueueNames
from airflow_broadway.producers.rabbitmq.journal import QueueJournal

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

log = logging.getLogger(__name__)

#: How often a queue that does not answer is made anew on one connection.
_MAX_TRIES = 3


class StandingQueues:
    """Those of one producer.

    :param journal: Where it is noted which of them are old enough to be relied on.
    """

    def __init__(self, options: RabbitMQOptions, journal: QueueJournal, names: QueueNames) -> None:
        self._journal = journal
        self._names = names
        self._owns_dead = options.dead_letter is None
        #: The connection, and what was declared on it.
        self._connection: ConnectionThread | None = None
        self._made: set[str] = set()
        #: Queues that may be new: their arguments, and since when they are there at the latest.
        self._young: dict[str, tuple[dict[str, Any], float]] = {}
        #: Queues to be made anew.  Kept over connections: asking such a queue may end one.
        self._silent: set[str] = set()

    def ensure_held(self, connection: ConnectionThread, name: str) -> None:
        """Declare a holding queue."""
        self._ensure(connection, name, KEEPING)

    def ensure_dead(self, connection: ConnectionThread, *, rely: bool = True) -> None:
        """Declare the dead-letter queue, if it is ours.

        :param rely: Whether something is published to it next, so that it must be old enough.
        """
        if self._owns_dead:
            self._ensure(connection, self._names.dead, KEEPING, rely=rely)

    def ensure_delay(self, connection: ConnectionThread, step: int) -> str:
        """Declare a step of the delay ladder; its name."""
        name = self._names.delay(step)
        self._ensure(connection, name, self._names.delay_arguments(step))
        return name

    def rely(self, connection: ConnectionThread) -> None:
        """Wait until queues that may be new are old enough, and see that they answer.

        :raises ProducerUnavailable: If one does not.
        """
        for name, (arguments, since) in list(self._young.items()):
            if not self._journal.relied(name):
                queue_calls.await_age(time.monotonic() - since)
                if name in self._silent or not self._is_alive(connection, name):
                    self._make_anew(connection, name, arguments)
                self._journal.note_relied(name)
            del self._young[name]

    def _ensure(
        self,
        connection: ConnectionThread,
        name: str,
        arguments: dict[str, Any],
        *,
        rely: bool = True,
    ) -> None:
        if connection is not self._connection:
            self._connection, self._made = connection, set()
        if name not in self._made:
            if queue_calls.depth(connection, name) is None:
                # Before it is there again: who finds it there must not take it for the old one.
                self._journal.note_declared(name)
            queue_calls.declare(connection, name, arguments)
            self._made.add(name)
            self._young[name] = arguments, time.monotonic()
        if rely:
            self.rely(connection)

    @staticmethod
    def _is_alive(connection: ConnectionThread, name: str) -> bool:
        """Whether a queue answers; one that has messages and may not give them up is not asked."""
        depth = queue_calls.depth(connection, name)
        return bool(depth) or (depth == 0 and queue_calls.is_empty(connection, name) is not None)

    def _make_anew(
        self, connection: ConnectionThread, name: str, arguments: dict[str, Any]
    ) -> None:
        """Replace a queue that never answered since it was declared, and so holds nothing.

        :raises ProducerUnavailable: If it may hold something, or does not answer either.  If asking
            it ended the connection, the next connection replaces it unasked.
        """
        for _ in range(_MAX_TRIES):
            # Whoever relies on a queue has noted that before: this one was declared by a run of
            # ours, and then RabbitMQ died.
            if self._journal.relied(name) is not False:
                break
            log.warning("The queue %r was declared, and never answered: it is made anew.", name)
            self._silent.add(name)
            queue_calls.delete(connection, name)
            queue_calls.declare(connection, name, arguments)
            self._silent.discard(name)
            queue_calls.await_age()
            if self._is_alive(connection, name):
                return
        raise ProducerUnavailable(
            f"the queue {name!r} does not answer: RabbitMQ may have died right after it was"
            " declared; look at its log, and if the queue stays so and holds nothing, delete it"
            " (rabbitmqctl delete_queue): the next run declares it anew"
        )
