"""Publishes what follows from verdicts: one message that fails leaves the others alone.

A message that cannot be published, or that the broker refuses, stays in the holding queue, in a
bundle of such messages.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import Entry
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq import marks
from airflow_broadway.producers.rabbitmq.amqp.confirms import Publisher
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.properties import encode, staged_delivery
from airflow_broadway.producers.rabbitmq.broker.names import rung
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import Header, Held

#: A name for one settling of a generation, and whether it may publish what another did before.
Turn = tuple[str, bool]
#: Messages, and bytes of them, after which their confirms are waited for: so memory stays flat.
_CHECKPOINT_MESSAGES, _CHECKPOINT_BYTES = 5_000, 16 * 1024 * 1024
#: Bytes that the header of a bundle may take.
_BUNDLE_HEADER_BYTES = 4096


def held_of(entry: Entry) -> Held:
    """A staged message as a bundle would hold it."""
    route, properties, redelivered = staged_delivery(entry.properties)
    payload = entry.payload or b""
    return Held(entry.message_id, entry.attempt, redelivered, route, properties, payload)


def staged(entry: Entry) -> bool:
    """Whether staging has all that it takes to publish the message."""
    try:
        staged_delivery(entry.properties)
    except ProducerError:
        return False
    return entry.payload is not None


class Outbox:
    """What one settlement publishes.

    :param deadline: When the lease lapses.
    :param holding_queue: Where refused messages stay; ``None``: their bundles stay as they are.
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
        *,
        holding_queue: str | None,
        turn: Callable[[], Turn] | None = None,
    ) -> None:
        self.guard = MessageGuard()
        #: The names of the bundles of refused messages.
        self.remainders: set[str] = set()
        self._connection = connection
        self._queues = queues
        self._clock = clock
        self._generation = generation
        self._deadline = deadline
        self._next_turn = turn or (lambda: queues.journal.note_turn(generation, whole=True))
        # The most bytes that the broker takes in one message, where that is known.
        limit = queues.journal.limit() or sys.maxsize
        self._capacity = min(bundles.MAX_BYTES, limit - _BUNDLE_HEADER_BYTES)
        self._holding_queue = holding_queue
        self._turn: Turn | None = None
        self._opened: Publisher | None = None
        # Since the last checkpoint: what is under way, in case it is refused, and what failed.
        self._sent: dict[str, tuple[Held, Action]] = {}
        self._refused: list[Held] = []
        self._bytes = 0
        self._failed: dict[str, Action] = {}

    # -- publishing ----------------------------------------------------------------------------

    def carry_out(self, held: Held, verdict: Verdict, *, repeated: bool = False) -> Action:
        """Publish what follows from a verdict other than ``ACK``; :meth:`finish` says what failed.

        :param repeated: Whether another settlement may publish the same: a dead letter says so.
        :returns: The action: a message without room for the mark of a retry is a dead letter.
        """
        action, key = verdict.action, held.message_id
        self._bytes += bundles.weight_of(held)
        with self.guard.each(key):
            try:
                self._publish(held, verdict, repeated)
            except marks.TooLarge as error:
                if action is Action.DEAD_LETTER:
                    raise
                action = Action.DEAD_LETTER
                reason = f"it cannot be delivered again: {error}"
                self._publish(held, Verdict(action, 0.0, reason, "settle"), repeated)
        if key in self.guard.refused:
            self._fail(held, action)
        if (
            len(self._sent) + len(self._refused) > _CHECKPOINT_MESSAGES
            or self._bytes > _CHECKPOINT_BYTES
        ):
            self._checkpoint()
        return action

    def _publish(self, held: Held, verdict: Verdict, repeated: bool) -> None:
        exchange, routing_key = self._place(held, verdict)
        self._queues.check_place(self._connection, exchange, routing_key)
        properties = self._properties(held, verdict, repeated)
        if len(routing_key.encode()) > 255:
            raise ProducerError(f"its routing key cannot be published again: {routing_key!r}")
        self._sent[held.message_id] = (held, verdict.action)
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

    @property
    def _publisher(self) -> Publisher:
        if self._opened is None:
            self._opened = Publisher(self._connection, marks.publication_key)
        return self._opened

    # -- what came of it -----------------------------------------------------------------------

    def finish(self) -> dict[str, Action]:
        """Wait until all is confirmed; returns what failed: message id → what was to be done.

        :raises ProducerError: If the holding queue takes none of them: then nothing is to be
            acknowledged.
        """
        self._checkpoint()
        self._checkpoint()  # what the first has put back
        return self._failed

    def _fail(self, held: Held, action: Action) -> None:
        self._sent.pop(held.message_id, None)
        self._failed[held.message_id] = action
        if self._holding_queue is not None:
            self._refused.append(held)

    def _checkpoint(self) -> None:
        """Forget what is confirmed, and put what failed into the holding queue, as it came."""
        refused = self._publisher.flush() if self._opened is not None else {}
        for key, reason in refused.items():
            if key in self.remainders:
                raise ProducerError(
                    f"the holding queue {self._holding_queue!r} takes nothing ({reason}): nothing"
                    " was settled; make room and clear the task"
                )
            self.guard.refuse(key, f"RabbitMQ refused: {reason}")
            self._fail(*self._sent[key])
        messages, self._refused = self._refused, []
        self._sent.clear()
        self._bytes = 0
        for part in bundles.grouped(messages, self._capacity):
            self._put_back(part)

    def _put_back(self, messages: list[Held]) -> None:
        name = f"{self._generation}.{time.time_ns():x}.{len(self.remainders)}"
        header = Header(
            bundle=name,
            generation=self._generation,
            queue=self._queues.names.source,
            count=len(messages),
            until=0.0,
            remainder=True,
        )
        self.remainders.add(name)
        holding_queue = str(self._holding_queue)
        self._queues.ensure_held(self._connection, holding_queue)
        self._publisher.publish(
            "",
            holding_queue,
            encode({"delivery_mode": 2, "message_id": name}),
            bundles.pack(header, [held._replace(redelivered=True) for held in messages]),
            key=name,
        )
