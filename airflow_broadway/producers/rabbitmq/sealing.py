"""Makes bundles of one generation's messages, and keeps what is secured until it is handed out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.bundle import Header, Held
from airflow_broadway.producers.rabbitmq.lane import Lane
from airflow_broadway.producers.rabbitmq.properties import encode
from airflow_broadway.producers.rabbitmq.queues import EXCHANGE, Queues

__all__ = ["Ready", "Sealer"]


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
        self.error: BroadwayError | None = None

    def add(self, loads: list[list[Held] | None]) -> None:
        """Bundles may be relied on."""
        with self.changed:
            for load in loads:
                if load:
                    self.bundles.append(load)
                    self.secured += 1
            self.changed.notify()

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


@dataclass
class Sealer:
    """Makes bundles of one generation, and publishes them to its lease queue.

    :param store: Staged custody: keeps the messages of a bundle and returns the reference to them.
    """

    generation: str
    queues: Queues
    owner: dict[str, Any]
    store: Callable[[str, bytes], dict[str, Any]] | None = None
    #: The lease queue; known before the first bundle.
    target: str = ""
    count: int = 0
    #: Messages that were given an id; goes on over connections, as ids are unique.
    number: int = 0
    #: Messages published before, and secured: their id → what tells a repetition.
    again: dict[str, int] = field(default_factory=dict, repr=False)
    #: Returned bundles whose messages are secured here, by their bytes: the same once more are done
    #: with.  Not by name, under which other messages may come.
    returned: set[bytes] = field(default_factory=set, repr=False)
    #: Bundles that are sealed and not yet published.
    waiting: int = 0
    prefix: str = ""
    _writer: ThreadPoolExecutor | None = field(default=None, repr=False)

    def publish(self, lane: Lane, messages: list[Held], tag: int | None) -> None:
        """Secure ``messages``; then ``tag`` may be acknowledged.  For the link's thread."""
        self.count += 1
        self.waiting += 1
        name = f"{self.prefix}.{self.count:x}"
        if self.store is None:
            body = bundles.pack(self._header(name, len(messages)), messages)
            self._publish(lane, name, body, tag, messages)
            return
        # One writer, so that what is published keeps the order of the delivery tags.
        self._writer = self._writer or ThreadPoolExecutor(1, "rabbitmq-staging")
        store = self.store
        link = lane.channel.link

        def done(future: Future[dict[str, Any]]) -> None:
            link.post(lambda: self._stored(future, lane, name, messages, tag))

        self._writer.submit(lambda: store(name, bundles.pack_messages(messages))).add_done_callback(
            done
        )

    def close(self) -> None:
        """End the writer."""
        if self._writer is not None:
            self._writer.shutdown(wait=True, cancel_futures=True)

    def _stored(
        self,
        future: Future[dict[str, Any]],
        lane: Lane,
        name: str,
        messages: list[Held],
        tag: int | None,
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
        body = bundles.pack(self._header(name, len(messages), future.result()), [])
        self._publish(lane, name, body, tag, messages)

    def _header(self, name: str, count: int, staged: dict[str, Any] | None = None) -> Header:
        return Header(
            bundle=name,
            generation=self.generation,
            queue=self.queues.source,
            count=count,
            owner=self.owner,
            staged=staged,
        )

    def _publish(
        self, lane: Lane, name: str, body: bytes, tag: int | None, messages: list[Held]
    ) -> None:
        self.waiting -= 1
        properties = encode(
            {
                "content_type": "application/x-broadway-bundle",
                "delivery_mode": 2,
                "message_id": name,
            }
        )
        lane.publish(EXCHANGE, self.target, properties, body, key=name, tag=tag, load=messages)
