"""The receiving generation, across its connections: its lease, its bundles, its ids.

An id is assigned at a message's first receipt.  When the message is republished, its mark carries
the id.  Programs that copy messages copy marks too.  So two messages with the same id are different
messages, and the second gets another id.  The exception is a duplicate: two turns of one settlement
published the same message, according to the journal.
"""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed
from airflow_broadway.producers.rabbitmq.amqp.channels import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.broker.holding_queues import EXCHANGE
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import MAX_BYTES, Header, Held, pack
from airflow_broadway.producers.rabbitmq.journal import QueueJournal, Turns
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

log = logging.getLogger(__name__)

#: The number of quarantined messages that are logged one by one; the others are only counted.
_LOGGED = 10


class Quarantined(NamedTuple):
    """A message that is dead-lettered without being handled.

    :param kind: ``oversized`` or ``bundle``.
    """

    message_id: str
    kind: str
    reason: str


class Buffer:
    """The secured messages, in order, and the credit for more; for all threads.

    A message is *under way* from leaving its queue until it is returned to the run.  No more than
    ``credit`` are under way: the run's demand, less the messages that it received.
    """

    def __init__(self) -> None:
        #: Locked while several fields are read together; notified when one has changed.
        self.changed = threading.Condition()
        self.credit = 0
        self.under_way = 0
        #: The total number of secured bundles.
        self.bundles = 0
        #: The number of messages that were dead-lettered unprocessed, by kind.
        self.set_aside: Counter[str] = Counter()
        #: The error that ended receiving.
        self.error: BroadwayError | None = None
        self._waiting: deque[list[Held]] = deque()

    @property
    def empty(self) -> bool:
        """Whether no secured message is left."""
        return not self._waiting

    # -- the thread of the run -----------------------------------------------------------------

    def demand(self, count: int) -> None:
        """Sets the credit."""
        with self.changed:
            self.credit = count

    def take(self, demand: int) -> list[Held]:
        """Removes and returns at most ``demand`` messages."""
        taken: list[Held] = []
        with self.changed:
            while self._waiting and len(taken) < demand:
                head = self._waiting[0]
                room = demand - len(taken)
                if len(head) <= room:
                    taken += self._waiting.popleft()
                else:
                    taken += head[:room]
                    self._waiting[0] = head[room:]
            self.under_way -= len(taken)
            self.credit -= len(taken)  # until the next demand
        return taken

    def take_all(self) -> list[Held]:
        """Removes and returns all messages; others that were under way are requeued."""
        with self.changed:
            taken = self.take(self._count())
            self.under_way = 0
        return taken

    def begin(self) -> None:
        """Clears the error of an earlier connection, before the next one is opened."""
        with self.changed:
            self.error = None

    def forget_unsecured(self) -> None:
        """Forgets the unsecured messages of a lost connection: the broker requeues them."""
        with self.changed:
            self.under_way = self._count()

    def _count(self) -> int:
        return sum(map(len, self._waiting))

    # -- the thread of the connection ----------------------------------------------------------

    def claim(self, available: int) -> int:
        """Returns how many of ``available`` messages have credit; these are now under way."""
        with self.changed:
            room = max(0, min(available, self.credit - self.under_way))
            self.under_way += room
        return room

    def unclaim(self, count: int) -> None:
        """Releases the claim of messages that were not packed."""
        with self.changed:
            self.under_way -= count

    @property
    def full(self) -> bool:
        """Whether all credit is used."""
        return self.under_way >= self.credit

    def add(self, loads: Iterable[list[Held] | Quarantined | None]) -> None:
        """Adds secured messages: those of bundles, and dead-lettered ones."""
        with self.changed:
            for load in loads:
                if isinstance(load, Quarantined):
                    self._count_quarantined(load)
                elif load:  # other publications have no load
                    self._waiting.append(load)
                    self.bundles += 1
            self.changed.notify()

    def _count_quarantined(self, quarantined: Quarantined) -> None:
        self.set_aside[quarantined.kind] += 1
        if self.set_aside.total() <= _LOGGED:
            log.error(
                "Message %s is a dead letter, unprocessed: %s.",
                quarantined.message_id,
                quarantined.reason,
                extra={"code": "set_aside"},
            )

    def fail(self, error: BroadwayError) -> None:
        """Records the error that ended receiving; the first one is kept."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify()

    def notify(self) -> None:
        """Wakes the run's thread."""
        with self.changed:
            self.changed.notify()


#: Bytes of an id that are kept when a suffix is added, so that the result fits a mark.
_MAX_BASE_BYTES = 160
#: The number of ids in memory, at 130 bytes each, or 280 with a mark.  Later ids get a suffix that
#: is unique without being remembered.
_MAX_REMEMBERED = 1_000_000

#: Of a marked message: a hash of its content, and the turns that published it.
_Origin = tuple[int, tuple[str, ...]]


class Ids:
    """Assigns message ids; for the connection's thread.

    :param prefix: The unique prefix of the ids that this generation assigns.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._number = 0
        # Hash of the id → origin, for every id that another generation assigned.
        self._taken: dict[int, _Origin] = {}
        self._unsecured: set[int] = set()

    def fresh(self) -> str:
        """Returns a new id."""
        self._number += 1
        return f"{self.prefix}-{self._number:x}"

    def marked(
        self, message_id: str, content: int, turn: str, turns: Collection[str]
    ) -> str | None:
        """Returns the id of a marked message; ``None`` if another turn's copy was received already.

        :param content: A hash of all that duplicates have in common.
        :param turn: The turn that published the message.
        :param turns: All turns in the journal of the generation that released it.
        """
        key = hash(message_id)
        before = self._taken.get(key)
        if before is not None:
            same, seen = before
            if same == content and turn in turns and turn not in seen and {*seen} <= {*turns}:
                self._taken[key] = (same, (*seen, turn))
                return None
        known = self.prefix in message_id or before is not None
        if known or len(self._taken) >= _MAX_REMEMBERED:
            base = message_id.partition("~")[0].encode()[:_MAX_BASE_BYTES].decode("utf-8", "ignore")
            return f"{base}~{self.fresh()}"
        self._taken[key] = (content, (sys.intern(turn),))
        self._unsecured.add(key)
        return message_id

    def secured(self, loads: Iterable[object]) -> None:
        """Keeps the ids of secured messages for the next connection."""
        if self._unsecured:
            for load in loads:
                for message in load if isinstance(load, list) else ():
                    self._unsecured.discard(hash(message.message_id))

    def reconnect(self) -> None:
        """Forgets the ids of unsecured messages, which are redelivered."""
        for key in self._unsecured:
            del self._taken[key]
        self._unsecured.clear()


#: The fraction of a lease, at its end, in which a generation does not receive.
_LEASE_MARGIN = 0.02


class Intake:
    """A receiving generation; for the run's thread, except for :meth:`publish`.

    :param env: The generation's environment.
    """

    def __init__(self, options: RabbitMQOptions, env: ProducerEnv) -> None:
        self.options = options
        self.env = env
        self.journal = QueueJournal(env.staging, options.queue, env.shared)
        self.queues = StandingQueues(options, self.journal)
        self.buffer = Buffer()
        self.ids = Ids(secrets.token_hex(8))
        self.turns = Turns(self.journal)
        #: The holding queue's name; empty until it is opened: an empty run opens none.
        self.holding_queue = ""
        #: The end of the lease, and the error after it has lapsed.
        self.deadline = self._fresh_deadline()
        self.lapsed: LeaseLapsed | None = None
        #: Maximum bytes of messages in a bundle; a larger message is a bundle of its own.
        self.capacity = min(MAX_BYTES, options.max_message_bytes)
        self._key = self.queues.names.key(env.generation)
        self._earlier = ""
        self._count = 0

    # -- the lease -----------------------------------------------------------------------------

    def open(self, connection: ConnectionThread) -> None:
        """Opens a holding queue.

        :raises LeaseLapsed: If the generation was released before its first message.
        :raises ProducerError: If the queue is not reliable, or the broker refuses.
        """
        self.queues.prepare_dead(connection)
        self.deadline = self._fresh_deadline()
        generation = self.env.generation
        self.holding_queue = self.queues.holding.open(
            connection,
            self.queues.ensure_held,
            generation,
            pack(self._header(f"{generation}.0", 0), []),
            earlier=self._earlier,
            note=self._note,
        )

    def _note(self, name: str) -> None:
        """Records the holding queue before it is bound; refuses a released generation."""
        self._earlier = name
        self.journal.note_opened(self.env.generation, name, self.deadline)
        if self.journal.is_over(self.env.generation):
            self.lapsed = LeaseLapsed(
                "this run's task was released before its first message, by a sweep or by hand:"
                " clear the task to receive again"
            )
            raise self.lapsed

    def check_deadline(self) -> None:
        """Checks that the lease has enough time left to receive.

        :raises LeaseLapsed: If it has not.
        """
        left = (self.deadline - self.env.clock.now()).total_seconds()
        if not self.holding_queue:  # without messages the lease has not begun
            self.deadline = self._fresh_deadline()
        elif left < self.options.lease * _LEASE_MARGIN:
            self.lapsed = LeaseLapsed(
                "this run's lease is about to end while it still receives messages: let it receive"
                " for a shorter time (max_seconds), or give the producer a longer lease"
            )
            raise self.lapsed

    def _fresh_deadline(self) -> datetime:
        return self.env.clock.now() + timedelta(seconds=self.options.lease)

    # -- bundles -------------------------------------------------------------------------------

    def publish(self, channel: ConfirmChannel, messages: list[Held], tag: int | None) -> None:
        """Publishes ``messages`` as a bundle, whose confirm acknowledges ``tag``."""
        self._count += 1
        name = f"{self.ids.prefix}.{self._count:x}"
        body = pack(self._header(name, len(messages)), messages)
        kind = "application/x-broadway-bundle"
        properties = encode(content_type=kind, delivery_mode=2, message_id=name)
        channel.publish(EXCHANGE, self._key, properties, body, key=name, tag=tag, load=messages)

    def _header(self, bundle: str, count: int) -> Header:
        return Header(
            bundle=bundle,
            generation=self.env.generation,
            queue=self.options.queue,
            count=count,
            until=self.deadline.timestamp(),
            owner=dict(self.env.owner),
        )
