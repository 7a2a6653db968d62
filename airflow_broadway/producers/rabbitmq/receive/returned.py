"""Secures anew what came back: reads the returns queue, as deep as it was when the run began.

A bundle comes back because its lease lapsed or was given up.  Whoever reads it first asks the
journal of the generation that held it: what was settled or published again is dropped, the rest is
handled, marked as redelivered.  What a run has no room for goes to the end of the queue, and is
read again by the same run.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import Refused
from airflow_broadway.producers.rabbitmq.amqp.get import Getter
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.bundle import BundleError, Header, Held
from airflow_broadway.producers.rabbitmq.journal import Journal
from airflow_broadway.producers.rabbitmq.marks import Mark, buried, publication_key
from airflow_broadway.producers.rabbitmq.receive.bundler import Aside, Bundler, Ready
from airflow_broadway.producers.rabbitmq.receive.suspects import Division, divide
from airflow_broadway.producers.rabbitmq.staged_bundle import load_staged

if TYPE_CHECKING:
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

__all__ = ["ReturnsReader", "examine"]

log = logging.getLogger(__name__)

#: Bundles that are known to be done with: the latest, as a connection that breaks brings back no
#: others.
_DONE = 10_000
#: Seconds for the returns queue to answer.
_ANSWER = 20.0


@dataclass(frozen=True, slots=True)
class ReturnedBundle:
    """A bundle that was read."""

    header: Header
    messages: list[Held]


def examine(data: bytes, journal: Journal) -> ReturnedBundle | None:
    """Read a returned bundle, less what needs no handling; ``None`` if nothing of it does.

    :raises BundleError: If it cannot be read, or what it refers to is missing.
    :raises StagingError: If the staging folder cannot be read now.
    """
    header, messages = bundles.unpack(data)
    done = journal.done(header.generation, None if header.released else header.bundle)
    if done is None:
        return None
    if header.staged is not None:
        messages = load_staged(header, journal)
    if done:
        messages = [message for message in messages if message.message_id not in done]
    return ReturnedBundle(header, [message._replace(redelivered=True) for message in messages])


class ReturnsReader:
    """The returns queue as one generation reads it; called from the run's thread.

    One bundle at a time is asked for, so that none waits here while callbacks take their time.
    """

    def __init__(
        self,
        producer: RabbitMQOptions,
        topology: Topology,
        journal: Journal,
        ready: Ready,
        sealer: Bundler,
    ) -> None:
        self._producer = producer
        self._topology = topology
        self._queue = topology.queues.returns
        self._journal = journal
        self._ready = ready
        self._sealer = sealer
        #: ``None`` on a connection that found nothing in the queue.
        self.lane: ConfirmChannel | None = None
        self._getter: Getter | None = None
        # Deliveries that go back once all is read: sooner, they would come again.
        self._put_off: list[int] = []
        # The messages on their way, by identity, and a hash of the bundle that they came in.
        self._taken: dict[int, bytes] = {}
        # Bundles whose messages are secured, by their bytes: the same once more are done with.  Not
        # by name, under which other messages may come.
        self._done: dict[bytes, None] = {}
        #: Bundles that are still to be read.
        self.left = 0
        #: Whether this generation holds suspects, and must take nothing else.
        self.alone = False

    def open(self, link: ConnectionThread) -> None:
        """Begin to read, on a new connection; nothing happens if nothing came back."""
        self.lane = self._getter = None
        self._taken, self._put_off = {}, []
        self.left = 0 if self.alone else self._topology.depth(link, self._queue) or 0
        if not self.left:
            return
        channel = link.channel()
        self.lane = ConfirmChannel(
            channel,
            multiple=False,
            secured=self._secured,
            failed=self._failed,
            what="the lease queue",
            key_of=publication_key,
        )
        self._getter = Getter(link, self._queue, channel)

    def drain(
        self, link: ConnectionThread, most: int, *, fresh: bool, open_lease: Callable[[], None]
    ) -> None:
        """Read one bundle, and have what may be taken of it secured.

        :param most: Messages that may be on their way together.
        :param fresh: Whether the generation was given no message yet.
        :raises StagingError: If the staging folder cannot be read.
        """
        ready, lane, getter = self._ready, self.lane, self._getter
        assert lane is not None
        assert getter is not None
        with ready.changed:
            room = most - ready.outstanding
            fresh = fresh and not ready.outstanding
        if room <= 0 or ready.error is not None:
            return
        delivered = self._next(link, getter)
        if delivered is not None:
            self.left -= 1
            self._handle(link, lane, delivered, room, fresh, open_lease)
        elif lane.window.idle or not ready.outstanding:  # another run has them
            # Else a rest may be on its way there: it is confirmed before what was taken.
            self.left = 0
        if not self.left and self._put_off:
            tags, self._put_off = self._put_off, []
            link.post(lambda: lane.give_back(tags))

    def _handle(
        self,
        link: ConnectionThread,
        lane: ConfirmChannel,
        delivered: Delivered,
        room: int,
        fresh: bool,
        open_lease: Callable[[], None],
    ) -> None:
        try:
            read = examine(delivered.body, self._journal)
        except BundleError as error:
            self._quarantine(link, lane, delivered, error)
            return
        print_ = hashlib.blake2b(delivered.body, digest_size=16).digest()
        if read is None or print_ in self._done:
            link.post(lambda: lane.ack(delivered.tag))
            return
        portion = divide(
            read.messages, room=room, fresh=fresh, max_crashes=self._producer.max_crashes
        )
        if portion is None:  # for another generation
            self._put_off.append(delivered.tag)
            return
        if portion.take:
            open_lease()
        rests = list(bundles.parts(portion.later, self._sealer.capacity))
        if portion.alone:
            self.alone, self.left = True, 0
        elif portion.take:  # there was no room for them: they come again, behind the others
            self.left += len(rests)
        with self._ready.changed:
            self._ready.outstanding += len(portion.take)
        self._topology.ensure_dead(link, bool(portion.crashed))
        link.post(lambda: self._secure(lane, delivered.tag, print_, read.header, portion, rests))

    def _next(self, link: ConnectionThread, getter: Getter) -> Delivered | None:
        try:
            return getter.next(_ANSWER)
        except ProducerUnavailable as error:
            if link.lost is not None:
                raise
            log.warning("The returns queue %r does not answer: %s.", self._queue, error)
            return None

    def _quarantine(
        self, link: ConnectionThread, lane: ConfirmChannel, delivered: Delivered, error: BundleError
    ) -> None:
        """Move what cannot be read out of the way, and say so."""
        place = self._topology.queues.quarantine
        self._topology.ensure_quarantine(link)
        log.error(
            "What lay in %r cannot be read, and is moved to %r: %s.",
            self._queue,
            place,
            error,
            extra={"code": "bundle_unreadable"},
        )

        def run() -> None:
            key = self._sealer.ids.fresh()
            lane.publish(
                "",
                place,
                buried(
                    delivered,
                    Mark(key, self._sealer.generation, 1),
                    reason=str(error),
                    stage="returns",
                    limit=link.max_properties,
                ),
                delivered.body,
                key=key,
                tag=delivered.tag,
            )

        link.post(run)

    def _secure(
        self,
        lane: ConfirmChannel,
        tag: int,
        print_: bytes,
        header: Header,
        portion: Division,
        rests: list[list[Held]],
    ) -> None:
        """Publish what becomes of a bundle, then acknowledge it.  In the link's thread."""
        sealer, ids = self._sealer, self._sealer.ids
        exchange, routing_key = self._topology.dead
        for held in portion.crashed:
            reason = f"its process died {held.crashes} times, at last with nothing else to handle"
            lane.publish(
                exchange,
                routing_key,
                buried(
                    held,
                    Mark(held.message_id, sealer.generation, held.attempt),
                    reason=reason,
                    stage="crashed",
                    limit=lane.channel.link.max_properties,
                ),
                held.body,
                key=held.message_id,
                load=Aside(held.message_id, "crashed", reason),
            )
        for part in rests:
            name = ids.fresh()
            lane.publish(
                "",
                self._queue,
                encode({"delivery_mode": 2, "message_id": name}),
                bundles.pack(header.released_part(name, len(part)), part),
                key=name,
            )
        taken = [held._replace(message_id=ids.returned(held.message_id)) for held in portion.take]
        parts = list(bundles.parts(taken, sealer.capacity))
        for part in parts:
            if part is parts[-1]:  # relied on only when those before it are
                self._taken[id(part)] = print_
            sealer.publish(lane, part, tag if part is parts[-1] else None)
        if not parts and (portion.later or portion.crashed):
            lane.done(tag)
        elif not parts:  # all of it was settled at once
            lane.ack(tag)

    def _secured(self, loads: list[Any]) -> None:
        """Bundles may be relied on; what they were made of is about to be acknowledged."""
        for load in loads:
            if id(load) in self._taken:
                self._note_done(self._taken.pop(id(load)))
        self._sealer.ids.secured(loads)
        self._ready.add(loads)

    def _note_done(self, print_: bytes) -> None:
        if len(self._done) >= _DONE:
            del self._done[next(iter(self._done))]
        self._done[print_] = None

    def _failed(self, error: BroadwayError) -> None:
        if isinstance(error, Refused) and error.code == 404:  # deleted: nothing comes back from it
            error = ProducerUnavailable(f"the returns queue {self._queue!r}: {error.text}")
        self._ready.fail(error)
