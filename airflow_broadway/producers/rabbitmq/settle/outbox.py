"""Publishes what follows from verdicts: one message that fails leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.rabbitmq import marks
from airflow_broadway.producers.rabbitmq.amqp.confirms import Publisher
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.properties import staged_delivery
from airflow_broadway.producers.rabbitmq.broker.names import rung
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import Held

#: A name for one settling of a generation, and whether it may publish what another did before.
Turn = tuple[str, bool]


def held_of(entry: Entry) -> Held | None:
    """A staged message as a bundle would hold it; ``None`` if staging lacks a part of it."""
    try:
        route, properties, redelivered = staged_delivery(entry.properties)
    except ProducerError:
        return None
    if entry.payload is None:
        return None
    return Held(entry.message_id, entry.attempt, redelivered, route, properties, entry.payload)


class Outbox:
    """What one settlement publishes.

    A message that cannot be published, or that the broker refuses, is counted as failed: its bundle
    is to stay in the holding queue.

    :param deadline: When the lease lapses.
    :param turn: Called before the first message is published; by default the journal notes that the
        whole generation is settled.
    """

    def __init__(
        self,
        connection: ConnectionThread,
        queues: StandingQueues,
        clock: Clock,
        generation: str,
        deadline: datetime,
        turn: Callable[[], Turn] | None = None,
    ) -> None:
        self.guard = MessageGuard()
        self._connection = connection
        self._queues = queues
        self._clock = clock
        self._generation = generation
        self._deadline = deadline
        self._next_turn = turn or (lambda: queues.journal.note_turn(generation, whole=True))
        self._turn: Turn | None = None
        self._publisher: Publisher | None = None

    def carry_out(self, held: Held, verdict: Verdict, *, repeated: bool = False) -> Action:
        """Publish what follows from a verdict other than ``ACK``; :meth:`finish` says what failed.

        :param repeated: Whether another settlement may publish the same: a dead letter says so.
        :returns: The action: a message without room for the mark of a retry is a dead letter.
        """
        action = verdict.action
        with self.guard.each(held.message_id):
            try:
                self._publish(held, verdict, repeated)
            except marks.TooLarge as error:
                if action is Action.DEAD_LETTER:
                    raise
                action = Action.DEAD_LETTER
                reason = f"it cannot be delivered again: {error}"
                self._publish(held, Verdict(action, 0.0, reason, "settle"), repeated)
        return action

    def _publish(self, held: Held, verdict: Verdict, repeated: bool) -> None:
        exchange, routing_key = self._place(held, verdict)
        self._queues.check_place(self._connection, exchange, routing_key)
        properties = self._properties(held, verdict, repeated)
        if len(routing_key.encode()) > 255:
            raise ProducerError(f"its routing key cannot be published again: {routing_key!r}")
        if self._publisher is None:
            self._publisher = Publisher(self._connection, marks.publication_key)
        self._publisher.publish(exchange, routing_key, properties, held.body, key=held.message_id)

    def _place(self, held: Held, verdict: Verdict) -> tuple[str, str]:
        """Exchange and routing key."""
        if verdict.action is Action.DEAD_LETTER:
            self._queues.ensure_dead(self._connection)
            return self._queues.dead_for(held.route)
        delay = verdict.delay if verdict.action is Action.RETRY else 0.0
        if verdict.action is Action.LEAVE:
            delay = (self._deadline - self._clock.now()).total_seconds()
        step = rung(delay)
        if step is None:
            return "", self._queues.names.source
        return "", self._queues.ensure_delay(self._connection, step)

    def _properties(self, held: Held, verdict: Verdict, repeated: bool) -> bytes:
        turn, repeats = self._turn = self._turn or self._next_turn()
        action, limit = verdict.action, self._connection.max_properties
        attempt = held.attempt + (1 if action is Action.RETRY else 0)
        mark = marks.Mark(held.message_id, self._generation, attempt, turn)
        if action is not Action.DEAD_LETTER:
            return marks.republished(held, mark, limit=limit)
        return marks.dead_lettered(
            held,
            mark,
            reason=verdict.reason,
            stage=verdict.stage,
            source=self._queues.names.source,
            now=self._clock.now(),
            # Retries need no such note: what bears our header is received as redelivered.
            repeated=held.redelivered or repeats or repeated,
            limit=limit,
        )

    def finish(self) -> Mapping[str, str]:
        """Wait until all is confirmed; returns what failed: message id → why.

        :raises ProducerError: If the channel is lost: then nothing is to be acknowledged.
        """
        refused = {} if self._publisher is None else self._publisher.flush()
        for key, reason in refused.items():
            self.guard.refuse(key, f"RabbitMQ refused: {reason}")
        return self.guard.refused
