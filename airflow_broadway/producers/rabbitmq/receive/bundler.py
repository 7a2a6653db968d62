"""Makes bundles of one generation's messages, and keeps what is secured until it is handed out."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.confirm_window import Place
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.broker.names import EXCHANGE, QueueNames
from airflow_broadway.producers.rabbitmq.bundle import Header, Held
from airflow_broadway.producers.rabbitmq.journal import Turns
from airflow_broadway.producers.rabbitmq.receive.ids import Ids

__all__ = ["Aside", "Bundler", "Ready"]

log = logging.getLogger(__name__)

#: Messages that are named in the log when they are set aside; the others are counted.
_TOLD = 10


class Aside(NamedTuple):
    """A message that goes among the dead letters without being handled.

    :param kind: ``oversized`` or ``crashed``.
    """

    message_id: str
    kind: str
    reason: str


class Ready:
    """What is secured and waits to be handed out; shared between the threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.bundles: deque[list[Held]] = deque()
        #: How many messages may be on their way together, from being taken to being handed out.
        self.credit = 0
        #: How many are.
        self.outstanding = 0
        #: Bundles that were secured.
        self.secured = 0
        #: Messages that were set aside unprocessed, by kind.
        self.set_aside: Counter[str] = Counter()
        self.error: BroadwayError | None = None

    def add(self, loads: Iterable[list[Held] | Aside | None]) -> None:
        """Bundles may be relied on, or what was published in their place."""
        with self.changed:
            for load in loads:
                if isinstance(load, Aside):
                    self._tell(load)
                elif load:  # else it was of another queue
                    self.bundles.append(load)
                    self.secured += 1
            self.changed.notify()

    def _tell(self, aside: Aside) -> None:
        self.set_aside[aside.kind] += 1
        if self.set_aside.total() <= _TOLD:
            log.error(
                "Message %s is a dead letter, unprocessed: %s.",
                aside.message_id,
                aside.reason,
                extra={"code": "set_aside"},
            )

    def fail(self, error: BroadwayError) -> None:
        """Nothing more comes."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify()

    def take(self, demand: int) -> list[Held]:
        """At most ``demand`` messages; the lock is held by the caller."""
        taken: list[Held] = []
        while self.bundles and len(taken) < demand:
            head = self.bundles[0]
            room = demand - len(taken)
            if len(head) <= room:
                taken += self.bundles.popleft()
            else:
                taken += head[:room]
                self.bundles[0] = head[room:]
        self.outstanding -= len(taken)
        self.credit -= len(taken)  # nobody asked for others in their place yet
        return taken


class Bundler:
    """Makes bundles of one generation, and publishes them to its lease queue.

    :param ids: The ids of its messages.
    :param turns: In which turns the settling of generations published messages.
    :param store: Staged custody: keeps the messages of a bundle and returns the reference to them.
    """

    def __init__(
        self,
        generation: str,
        queues: QueueNames,
        owner: dict[str, Any],
        ids: Ids,
        turns: Turns,
        store: Callable[[str, bytes], dict[str, Any]] | None = None,
    ) -> None:
        self.generation = generation
        self.queues = queues
        self.ids = ids
        self.turns = turns
        #: The lease queue; known before the first bundle.
        self.target = ""
        #: Bytes of messages in a bundle: no more than the broker takes.
        self.capacity = bundles.MAX_BYTES
        #: Bytes of a message alone, once the broker has refused a larger bundle.
        self.largest: int | None = None
        self._owner = owner
        self._store = store
        self._count = 0
        self._writer: ThreadPoolExecutor | None = None

    def fit(self, limit: int, *, refused: bool) -> bool:
        """Make bundles for a broker that takes no message of more than ``limit`` bytes.

        :param refused: Whether it has just refused one; else it did so to an earlier run.
        :return: Whether that changes anything.
        """
        room = limit - len(bundles.pack(self._header("x" * 48, bundles.MAX_MESSAGES), []))
        if self._store is not None or room <= 0:
            return False
        before = self.capacity, self.largest
        self.capacity = min(bundles.MAX_BYTES, room)
        if refused:
            self.largest = room
        return before != (self.capacity, self.largest)

    def publish(self, lane: ConfirmChannel, messages: list[Held], tag: int | None) -> None:
        """Secure ``messages``; then ``tag`` may be acknowledged.  For the link's thread."""
        self._count += 1
        name = f"{self.ids.prefix}.{self._count:x}"
        place = lane.reserve(name, tag=tag, load=messages)
        if self._store is None:
            body = bundles.pack(self._header(name, len(messages)), messages)
            self._send(lane, place, body)
            return
        self._writer = self._writer or ThreadPoolExecutor(1, "rabbitmq-staging")
        store = self._store
        link = lane.channel.link

        def done(future: Future[dict[str, Any]]) -> None:
            link.post(lambda: self._stored(future, lane, place, len(messages)))

        self._writer.submit(lambda: store(name, bundles.pack_messages(messages))).add_done_callback(
            done
        )

    def close(self) -> None:
        """End the writer."""
        if self._writer is not None:
            self._writer.shutdown(wait=True, cancel_futures=True)

    def _stored(
        self, future: Future[dict[str, Any]], lane: ConfirmChannel, place: Place, count: int
    ) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            lane.fail(
                error
                if isinstance(error, ProducerError)
                else ProducerError(f"a bundle could not be staged: {error}")
            )
            return
        self._send(lane, place, bundles.pack(self._header(place.key, count, future.result()), []))

    def _header(self, name: str, count: int, staged: dict[str, Any] | None = None) -> Header:
        return Header(
            bundle=name,
            generation=self.generation,
            queue=self.queues.source,
            count=count,
            owner=self._owner,
            staged=staged,
        )

    def _send(self, lane: ConfirmChannel, place: Place, body: bytes) -> None:
        properties = encode(
            {
                "content_type": "application/x-broadway-bundle",
                "delivery_mode": 2,
                "message_id": place.key,
            }
        )
        lane.send(place, EXCHANGE, self.target, properties, body)
