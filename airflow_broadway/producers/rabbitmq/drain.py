"""Secures anew what came back: reads the returns queue, as deep as it was when the run began."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import ProducerError, StagingError
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.bundle import Header
from airflow_broadway.producers.rabbitmq.journal import Journal
from airflow_broadway.producers.rabbitmq.lane import Lane
from airflow_broadway.producers.rabbitmq.link import Link
from airflow_broadway.producers.rabbitmq.properties import Mark, encode, republished
from airflow_broadway.producers.rabbitmq.returns import (
    Portion,
    examine,
    rest_header,
    split,
    unreadable,
)
from airflow_broadway.producers.rabbitmq.sealing import Ready, Sealer
from airflow_broadway.producers.rabbitmq.topology import Topology
from airflow_broadway.producers.rabbitmq.wire import Delivered, Parser

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.producer import RabbitMQProducer

__all__ = ["Returns"]

#: Returned bundles that the broker sends ahead.
_AHEAD = 2


class Returns:
    """The returns queue as one generation reads it; called from the run's thread."""

    def __init__(
        self,
        producer: RabbitMQProducer,
        topology: Topology,
        journal: Journal,
        ready: Ready,
        sealer: Sealer,
    ) -> None:
        self._producer = producer
        self._topology = topology
        self._journal = journal
        self._ready = ready
        self._sealer = sealer
        self._lane: Lane | None = None
        self._came: deque[Delivered] = deque()
        # The messages on their way, by identity, and a hash of the bundle that they came in.
        self._taken: dict[int, bytes] = {}
        #: Bundles that are still to be read.
        self.left = 0
        #: Whether this generation holds suspects, and must take nothing else.
        self.alone = False

    def open(self, link: Link) -> None:
        """Begin to read, on a new connection; nothing happens if nothing came back."""
        came = self._came = deque()
        self._lane = None
        self._taken = {}
        self.left = self._topology.depth(link, self._topology.queues.returns) or 0
        if not self.left:
            return
        channel, ready, queue = link.channel(), self._ready, self._topology.queues.returns
        self._lane = Lane(
            channel,
            multiple=False,
            secured=self._secured,
            failed=ready.fail,
            what="the lease queue",
        )

        def deliver(delivered: Delivered) -> None:
            with ready.changed:
                came.append(delivered)
                ready.changed.notify()

        parser = Parser(channel.number, deliver)

        def run() -> None:
            link.raw.parsers[channel.number] = parser
            channel.raw.basic_qos(prefetch_count=_AHEAD)
            channel.raw.basic_consume(queue, lambda *_: None)

        link.post(run)

    def drain(
        self,
        link: Link,
        most: int,
        *,
        wait: float,
        fresh: bool,
        open_lease: Callable[[], None],
    ) -> None:
        """Read one bundle, and have what may be taken of it secured.

        :param most: Messages that may be on their way together.
        :param fresh: Whether the generation was given no message yet.
        """
        ready, lane = self._ready, self._lane
        assert lane is not None
        with ready.changed:
            room = most - ready.outstanding
            if room <= 0:
                return
            ready.changed.wait_for(
                lambda: bool(self._came) or ready.error is not None, max(0.05, min(1.0, wait))
            )
            fresh = fresh and not ready.outstanding
        if not self._came:
            self.left = 0  # another run has them
            return
        delivered = self._came.popleft()
        self.left -= 1
        try:
            read = examine(delivered.body, self._journal)
        except (ProducerError, StagingError) as error:
            unreadable(error)
            return
        print_ = hashlib.blake2b(delivered.body, digest_size=16).digest()
        if read is None or print_ in self._sealer.returned:
            link.post(lambda: lane.ack(delivered.tag))
            return
        portion = split(
            read.messages, room=room, fresh=fresh, max_crashes=self._producer.max_crashes
        )
        if portion is None:
            return
        if portion.take:
            open_lease()
        if portion.alone:
            self.alone, self.left = True, 0
        with ready.changed:
            ready.outstanding += len(portion.take)
        self._topology.ensure_dead(link, bool(portion.crashed))
        link.post(lambda: self._secure(lane, delivered.tag, print_, read.header, portion))

    def _secure(
        self, lane: Lane, tag: int, print_: bytes, header: Header, portion: Portion
    ) -> None:
        """Publish what becomes of a bundle, then acknowledge it.  In the link's thread."""
        exchange, routing_key = self._topology.dead
        for held in portion.crashed:
            reason = f"its process died {held.crashes} times, at last with nothing else to handle"
            lane.publish(
                exchange,
                routing_key,
                republished(
                    held.properties,
                    Mark(held.message_id, self._sealer.generation, held.attempt),
                    extra={"x-broadway-reason": reason, "x-broadway-stage": "crashed"},
                ),
                held.body,
                key=held.message_id,
            )
        if portion.later:
            self._sealer.number += 1
            name = f"{self._sealer.prefix}.r{self._sealer.number:x}"
            lane.publish(
                "",
                self._topology.queues.returns,
                encode({"delivery_mode": 2, "message_id": name}),
                bundles.pack(rest_header(header, name, len(portion.later)), portion.later),
                key=name,
            )
        if portion.take:
            self._taken[id(portion.take)] = print_
            self._sealer.publish(lane, portion.take, tag)
        elif portion.later or portion.crashed:
            lane.done(tag)
        else:  # all of it was settled at once
            lane.ack(tag)

    def _secured(self, loads: list[Any]) -> None:
        """Bundles may be relied on; what they were made of is about to be acknowledged."""
        for load in loads:
            if load is not None and id(load) in self._taken:
                self._sealer.returned.add(self._taken.pop(id(load)))
        self._ready.add(loads)
