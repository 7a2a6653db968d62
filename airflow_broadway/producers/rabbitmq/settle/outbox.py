"""Publishes what follows from verdicts: one message that fails leaves the others alone.

A message that cannot be published, or that the broker refuses, goes back into the returns queue as
it came.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.custody.protocol import Entry, Lease
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.properties import encode, staged_delivery
from airflow_broadway.producers.rabbitmq.amqp.publisher import Publisher
from airflow_broadway.producers.rabbitmq.broker.names import rung
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.bundle import Header, Held
from airflow_broadway.producers.rabbitmq.marks import (
    Mark,
    TooLarge,
    dead_lettered,
    publication_key,
    republished,
)

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock

__all__ = ["Outbox", "Turn", "held_of", "staged"]

#: A name for one settling of a generation, and whether it may publish what another did before.
Turn = tuple[str, bool]
#: Messages, and bytes of them, after which their confirms are waited for: so memory stays flat.
_CHECKPOINT_MESSAGES, _CHECKPOINT_BYTES = 5_000, 16 * 1024 * 1024
#: Bytes that the header of a bundle may take.
_BUNDLE_HEADER_BYTES = 4096


def held_of(entry: Entry) -> Held:
    """A staged message as a bundle would hold it."""
    route, properties, again = staged_delivery(entry.properties)
    return Held(entry.message_id, entry.attempt, again, route, properties, entry.payload or b"")


def staged(entry: Entry) -> bool:
    """Whether staging has all that it takes to publish the message."""
    try:
        staged_delivery(entry.properties)
    except ProducerError:
        return False
    return entry.payload is not None


class Outbox:
    """What one settlement publishes.

    :param turn: Asked before the first message is published; notes it in the journal.
    :param limit: The most bytes that the broker takes in one message, where that is known.
    :param returns_refused: Whether what is refused goes into the returns queue; else it stays where
        it is.
    """

    def __init__(
        self,
        connection: ConnectionThread,
        topology: Topology,
        lease: Lease,
        clock: Clock,
        turn: Callable[[], Turn],
        limit: int | None,
        *,
        returns_refused: bool = True,
    ) -> None:
        self.guard = MessageGuard()
        self._connection = connection
        self._topology = topology
        self._lease = lease
        self._clock = clock
        self._ask = turn
        self._capacity = min(bundles.MAX_BYTES, (limit or sys.maxsize) - _BUNDLE_HEADER_BYTES)
        self._turn: Turn | None = None
        self._opened: Publisher | None = None
        self._returns_refused = returns_refused
        # Since the last checkpoint: what is under way, in case it is refused, and what failed.
        self._sent: dict[str, tuple[Held, Action]] = {}
        self._refused: list[Held] = []
        self._bytes = 0
        self._failed: dict[str, Action] = {}
        self._number = 0

    # -- publishing ----------------------------------------------------------------------------

    def carry_out(self, held: Held, verdict: Verdict, *, again: bool = False) -> None:
        """Publish what follows from a verdict other than ``ACK``; :meth:`finish` says what failed.

        :param again: Whether another settlement may publish the same: a dead letter says so.
        """
        action, key = verdict.action, held.message_id
        exchange, routing_key = self._place(held, verdict)
        if exchange:
            obstacle = self._topology.missing_exchange(self._connection, exchange)
        else:
            obstacle = self._topology.why_lossy(self._connection, routing_key)
        self._bytes += bundles.weight_of(held)
        if obstacle:
            self.guard.refuse(key, obstacle)
        else:
            with self.guard.each(key):
                self._publish(held, verdict, again, exchange, routing_key)
        if key in self.guard.refused:
            self._fail(held, action)
        if (
            len(self._sent) + len(self._refused) > _CHECKPOINT_MESSAGES
            or self._bytes > _CHECKPOINT_BYTES
        ):
            self._checkpoint()

    def _publish(
        self, held: Held, verdict: Verdict, again: bool, exchange: str, routing_key: str
    ) -> None:
        action, key = verdict.action, held.message_id
        try:
            properties = self._properties(held, verdict, again)
        except TooLarge:
            if action is Action.DEAD_LETTER:
                raise
            # Its attempt is counted all the same: by the bundle around it.
            attempt = held.attempt + (1 if action is Action.RETRY else 0)
            self._sent[key] = (held, action)
            self._in_bundle(held._replace(attempt=attempt), key)
            return
        if len(routing_key.encode()) > 255:
            raise ProducerError(f"its routing key cannot be published again: {routing_key!r}")
        self._sent[key] = (held, action)
        self._publisher.publish(exchange, routing_key, properties, held.body, key=key)

    def _place(self, held: Held, verdict: Verdict) -> tuple[str, str]:
        """Exchange and routing key."""
        delay = 0.0
        if verdict.action is Action.DEAD_LETTER:
            self._topology.standing.ensure_dead(self._connection)
            return self._topology.dead_for(held.route)
        if verdict.action is Action.RETRY:
            delay = verdict.delay
        elif verdict.action is Action.LEAVE:
            delay = (self._lease.deadline - self._clock.now()).total_seconds()
        step = rung(delay)
        if step is None:
            return "", self._topology.queues.source
        return "", self._topology.standing.ensure_delay(self._connection, step)

    def _properties(self, held: Held, verdict: Verdict, again: bool) -> bytes:
        turn, repeats = self._turn = self._turn or self._ask()
        action, limit = verdict.action, self._connection.max_properties
        attempt = held.attempt + (1 if action is Action.RETRY else 0)
        mark = Mark(held.message_id, self._lease.generation, attempt, turn)
        if action is not Action.DEAD_LETTER:
            return republished(held, mark, limit=limit)
        extra: dict[str, Any] = {
            "x-broadway-queue": self._topology.queues.source,
            "x-broadway-dead-at": self._clock.now().isoformat(),
        }
        if held.redelivered or repeats or again:
            # Retries need no such mark: what bears our header is received as redelivered.
            extra["x-broadway-redelivered"] = True
        return dead_lettered(
            held, mark, reason=verdict.reason, stage=verdict.stage, extra=extra, limit=limit
        )

    def release(self, header: Header, messages: Sequence[Held]) -> None:
        """Put messages back into the returns queue, in bundles made of the one they came in."""
        for number, part in enumerate(bundles.grouped(messages, self._capacity)):
            name = f"{header.bundle}.released" + (f".{number}" if number else "")
            again = header.released_part(name, len(part))
            self._publish_bundle(again, part, key=name)

    def _in_bundle(self, held: Held, key: str) -> None:
        self._number += 1
        header = self._header(f"alone.{self._number}")
        self._publish_bundle(header.released_part(header.bundle, 1), [held], key=key)

    def ensure_returns(self) -> None:
        """Declare the returns queue.

        :raises ProducerError: If a policy makes it lose messages: they are safer where they are.
        """
        lossy = self._topology.why_lossy(self._connection, self._topology.queues.returns)
        if lossy:
            raise ProducerError(
                f"{lossy}: nothing is released into it, and this lease lapses into it at"
                f" {self._lease.deadline.isoformat(timespec='seconds')}; let no such policy match"
                " ^broadway\\. before then, and clear the task"
            )
        self._topology.standing.ensure_returns(self._connection)

    def _publish_bundle(self, header: Header, messages: Sequence[Held], *, key: str) -> None:
        self.ensure_returns()
        self._publisher.publish(
            "",
            self._topology.queues.returns,
            encode({"delivery_mode": 2, "message_id": key}),
            bundles.pack(header, [m._replace(redelivered=True) for m in messages]),
            key=key,
        )

    def _header(self, name: str) -> Header:
        return Header(
            bundle=f"{self._lease.generation}.{name}.{time.time_ns():x}",
            generation=self._lease.generation,
            queue=self._topology.queues.source,
            count=0,
            owner=self._lease.owner,
        )

    @property
    def _publisher(self) -> Publisher:
        if self._opened is None:
            self._opened = Publisher(self._connection, publication_key)
        return self._opened

    # -- what came of it -----------------------------------------------------------------------

    def finish(self) -> dict[str, Action]:
        """Wait until all is confirmed; returns what failed: message id → what was to be done.

        :raises ProducerError: If the returns queue takes none of them: then nothing is to be
            acknowledged.
        """
        self._checkpoint()
        self._checkpoint()  # what the first has given back
        return self._failed

    def _fail(self, held: Held, action: Action) -> None:
        self._sent.pop(held.message_id, None)
        self._failed[held.message_id] = action
        if self._returns_refused:
            self._refused.append(held)

    def _checkpoint(self) -> None:
        """Forget what is confirmed, and give back what failed, as it came."""
        refused = self._publisher.flush() if self._opened is not None else {}
        for key, reason in refused.items():
            if key not in self._sent:  # a bundle of what is given back
                raise self._nothing_goes_back(reason)
            self.guard.refuse(key, f"RabbitMQ refused: {reason}")
            self._fail(*self._sent[key])
        given, self._refused = self._refused, []
        self._sent.clear()
        self._bytes = 0
        if given:
            self.release(self._header("refused"), given)

    def _nothing_goes_back(self, reason: str) -> ProducerError:
        return ProducerError(
            f"the returns queue {self._topology.queues.returns!r} takes nothing ({reason}): nothing"
            " was settled; make room and clear the task"
        )
