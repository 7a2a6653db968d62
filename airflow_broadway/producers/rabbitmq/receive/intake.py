"""The generation that receives, over all its connections: its lease, its bundles, its ids.

An id is made at a message's first receipt.  When the message is published again, its mark keeps the
id.  Programs that copy messages copy marks too: so an id that comes twice names two messages, and
the second is given another id.  There is one exception: what two turns of one settlement published,
as the journal shows, is the same message once more.
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

#: Messages that are named in the log when they are set aside; the others are counted.
_LOGGED = 10


class Aside(NamedTuple):
    """A message that goes among the dead letters without being handled.

    :param kind: ``oversized`` or ``bundle``.
    """

    message_id: str
    kind: str
    reason: str


class Buffer:
    """Secured messages in their order, and how many more may come; for all threads.

    A message is *under way* from being taken out of its queue until it is handed out.  No more than
    ``credit`` are taken: what the run has demanded, less what it was given.
    """

    def __init__(self) -> None:
        #: Held while several of the fields are read together; notified when one has changed.
        self.changed = threading.Condition()
        self.credit = 0
        self.under_way = 0
        #: Bundles that were secured, in all.
        self.bundles = 0
        #: Messages that were set aside unprocessed, by kind.
        self.set_aside: Counter[str] = Counter()
        #: Why nothing more comes.
        self.error: BroadwayError | None = None
        self._waiting: deque[list[Held]] = deque()

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be handed out."""
        return not self._waiting

    # -- the thread of the run -----------------------------------------------------------------

    def demand(self, count: int) -> None:
        """Let so many messages be under way."""
        with self.changed:
            self.credit = count

    def take(self, demand: int) -> list[Held]:
        """Hand out at most ``demand`` messages."""
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
            self.credit -= len(taken)  # nobody asked for others in their place yet
        return taken

    def take_all(self) -> list[Held]:
        """Hand out everything; what else was under way is its queue's again."""
        with self.changed:
            taken = self.take(self._count())
            self.under_way = 0
        return taken

    def begin(self) -> None:
        """Forget why an earlier connection ended: another is made."""
        with self.changed:
            self.error = None

    def forget_unsecured(self) -> None:
        """Forget what a lost connection took and did not secure: it is its queue's again."""
        with self.changed:
            self.under_way = self._count()

    def _count(self) -> int:
        return sum(map(len, self._waiting))

    # -- the thread of the connection ----------------------------------------------------------

    def claim(self, available: int) -> int:
        """How many of ``available`` messages may be taken; these are under way from now on."""
        with self.changed:
            room = max(0, min(available, self.credit - self.under_way))
            self.under_way += room
        return room

    def unclaim(self, count: int) -> None:
        """Note that so many claimed messages were not taken."""
        with self.changed:
            self.under_way -= count

    @property
    def full(self) -> bool:
        """Whether nothing more may be taken now."""
        return self.under_way >= self.credit

    def add(self, loads: Iterable[list[Held] | Aside | None]) -> None:
        """Take in what may be relied on: a bundle's messages, or what was set aside."""
        with self.changed:
            for load in loads:
                if isinstance(load, Aside):
                    self._count_aside(load)
                elif load:  # else it was of another queue
                    self._waiting.append(load)
                    self.bundles += 1
            self.changed.notify()

    def _count_aside(self, aside: Aside) -> None:
        self.set_aside[aside.kind] += 1
        if self.set_aside.total() <= _LOGGED:
            log.error(
                "Message %s is a dead letter, unprocessed: %s.",
                aside.message_id,
                aside.reason,
                extra={"code": "set_aside"},
            )

    def fail(self, error: BroadwayError) -> None:
        """Note why nothing more comes; the first reason stands."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify()

    def notify(self) -> None:
        """Have the run's thread look again at what it waits for."""
        with self.changed:
            self.changed.notify()


#: Bytes of an id that are kept when it is given an addition; with it, a mark still takes it.
_MAX_BASE_BYTES = 160
#: Ids that are remembered, at 130 bytes each, or 280 with a mark.  Those that come later are given
#: an addition, which nobody has to remember.
_MAX_REMEMBERED = 1_000_000

#: Of a message with a mark: a hash of all of it, and the turns that published it.
_Origin = tuple[int, tuple[str, ...]]


class Ids:
    """Gives out ids; for the connection's thread.

    :param prefix: Of the ids that are made here; unique.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._number = 0
        # By its hash, every id that was not made here, and the mark that it came by.
        self._taken: dict[int, _Origin] = {}
        self._unsecured: set[int] = set()

    def fresh(self) -> str:
        """An id of its own."""
        self._number += 1
        return f"{self.prefix}-{self._number:x}"

    def marked(
        self, message_id: str, content: int, turn: str, turns: Collection[str]
    ) -> str | None:
        """The id of a message with a mark; ``None`` if another turn's copy of it is here already.

        :param content: A hash of all that its repetition has in common with it.
        :param turn: The turn of settling that published it.
        :param turns: Those that the journal of who released it names.
        """
        key = hash(message_id)
        before = self._taken.get(key)
        if before is not None:
            same, given = before
            if same == content and turn in turns and turn not in given and {*given} <= {*turns}:
                self._taken[key] = (same, (*given, turn))
                return None
        known = self.prefix in message_id or before is not None
        if known or len(self._taken) >= _MAX_REMEMBERED:
            base = message_id.partition("~")[0].encode()[:_MAX_BASE_BYTES].decode("utf-8", "ignore")
            return f"{base}~{self.fresh()}"
        self._taken[key] = (content, (sys.intern(turn),))
        self._unsecured.add(key)
        return message_id

    def secured(self, loads: Iterable[object]) -> None:
        """Messages are secured: the next connection knows their ids too."""
        if self._unsecured:
            for load in loads:
                for held in load if isinstance(load, list) else ():
                    self._unsecured.discard(hash(held.message_id))

    def reconnect(self) -> None:
        """What was not secured comes again."""
        for key in self._unsecured:
            del self._taken[key]
        self._unsecured.clear()


#: A generation takes nothing more when this part of its lease is left.
_LEASE_MARGIN = 0.02


class Intake:
    """A generation that receives; for the run's thread, but for :meth:`publish`.

    :param env: Of the generation.
    """

    def __init__(self, options: RabbitMQOptions, env: ProducerEnv) -> None:
        self.options = options
        self.env = env
        self.journal = QueueJournal(env.staging, options.queue, env.shared)
        self.queues = StandingQueues(options, self.journal)
        self.buffer = Buffer()
        self.ids = Ids(secrets.token_hex(8))
        self.turns = Turns(self.journal)
        #: The holding queue; empty until it is opened: an empty run opens none.
        self.holding_queue = ""
        #: When the lease lapses, and why it is over, if it is.
        self.deadline = self._fresh_deadline()
        self.lapsed: LeaseLapsed | None = None
        #: Bytes of messages in a bundle; one larger message is a bundle of its own.
        self.capacity = min(MAX_BYTES, options.max_message_bytes)
        self._key = self.queues.names.key(env.generation)
        self._earlier = ""
        self._count = 0

    # -- the lease -----------------------------------------------------------------------------

    def open(self, connection: ConnectionThread) -> None:
        """Opens a holding queue.

        :raises LeaseLapsed: If the generation was released before it began.
        :raises ProducerError: If it is not to be relied on, or the broker refuses.
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
        """Notes the holding queue, before it is bound; then sees that nobody has released us."""
        self._earlier = name
        self.journal.note_opened(self.env.generation, name, self.deadline)
        if self.journal.is_over(self.env.generation):
            self.lapsed = LeaseLapsed(
                "this run's task was released before its first message, by a sweep or by hand:"
                " clear the task to receive again"
            )
            raise self.lapsed

    def check_deadline(self) -> None:
        """Sees that there is time left to receive.

        :raises LeaseLapsed: If there is not.
        """
        left = (self.deadline - self.env.clock.now()).total_seconds()
        if not self.holding_queue:  # what holds nothing cannot lapse
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
        """Secures ``messages``; then ``tag`` may be acknowledged.  For the connection's thread."""
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
