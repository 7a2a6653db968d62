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
from typing import Any

from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import Refused
from airflow_broadway.producers.rabbitmq.amqp.get import Getter
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.broker import queue_calls
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.bundle import BundleError, Header, Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.marks import publication_key
from airflow_broadway.producers.rabbitmq.receive.buffer import Buffer
from airflow_broadway.producers.rabbitmq.receive.bundler import Bundler
from airflow_broadway.producers.rabbitmq.receive.ids import Ids
from airflow_broadway.producers.rabbitmq.receive.quarantine import Quarantine
from airflow_broadway.producers.rabbitmq.staged_bundle import load_staged

__all__ = ["ReturnsReader", "examine"]

log = logging.getLogger(__name__)

#: Bundles that are known to be done with: the latest, as a connection that breaks brings back no
#: others.
_MAX_DONE = 10_000
#: Seconds for the returns queue to answer.
_ANSWER_TIMEOUT = 20.0


@dataclass(frozen=True, slots=True)
class ReturnedBundle:
    """A bundle that was read, with those of its messages that are to be handled.

    :param digest: BLAKE2b of the bundle's bytes, 16 bytes long.
    """

    header: Header
    messages: list[Held]
    digest: bytes


def examine(data: bytes, journal: QueueJournal) -> ReturnedBundle | None:
    """Read a returned bundle, without the messages that are done with; ``None`` if all are.

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
    return ReturnedBundle(
        header,
        [message._replace(redelivered=True) for message in messages],
        hashlib.blake2b(data, digest_size=16).digest(),
    )


class ReturnsReader:
    """The returns queue as one generation reads it; called from the run's thread.

    One bundle at a time is asked for, so that none waits here while callbacks take their time.
    """

    def __init__(
        self,
        topology: Topology,
        journal: QueueJournal,
        ids: Ids,
        quarantine: Quarantine,
        bundler: Bundler,
        buffer: Buffer,
    ) -> None:
        self._topology = topology
        self._queue = topology.queues.returns
        self._journal = journal
        self._ids = ids
        self._quarantine = quarantine
        self._bundler = bundler
        self._buffer = buffer
        #: ``None`` on a connection that found nothing in the queue.
        self.confirm_channel: ConfirmChannel | None = None
        self._getter: Getter | None = None
        # The messages on their way, by identity, and the digest of the bundle that they came in.
        self._taken: dict[int, bytes] = {}
        # Bundles whose messages are secured, by digest: the same once more are done with.  Not by
        # name, under which other messages may come.
        self._done: dict[bytes, None] = {}
        #: Bundles that are still to be read.
        self.left = 0

    def open(self, connection: ConnectionThread) -> None:
        """Begin to read, on a new connection; nothing happens if nothing came back."""
        self.confirm_channel = self._getter = None
        self._taken = {}
        self.left = queue_calls.depth(connection, self._queue) or 0
        if not self.left:
            return
        channel = connection.channel()
        self.confirm_channel = ConfirmChannel(
            channel,
            multiple=False,
            secured=self._secured,
            failed=self._failed,
            what="the lease queue",
            key_of=publication_key,
        )
        self._getter = Getter(connection, self._queue, channel)

    def read_one(
        self,
        connection: ConnectionThread,
        most: int,
        *,
        open_lease: Callable[[], None],
    ) -> None:
        """Read one bundle, and have what may be taken of it secured.

        :param most: Messages that may be under way together.
        :param open_lease: Called before the first is published.
        :raises StagingError: If the staging folder cannot be read.
        """
        channel, getter, under_way = self.confirm_channel, self._getter, self._buffer.under_way
        assert channel is not None
        assert getter is not None
        if most <= under_way or self._buffer.error is not None:
            return
        delivered = self._next(connection, getter)
        if delivered is not None:
            self.left -= 1
            self._handle(connection, channel, delivered, most - under_way, open_lease)
        elif channel.window.idle or not self._buffer.under_way:  # another run has them
            # Else a rest may be on its way there: it is confirmed before what was taken.
            self.left = 0

    def _handle(
        self,
        connection: ConnectionThread,
        channel: ConfirmChannel,
        delivered: Delivered,
        room: int,
        open_lease: Callable[[], None],
    ) -> None:
        try:
            read = examine(delivered.body, self._journal)
        except BundleError as error:
            self._move_away(connection, channel, delivered, str(error))
            return
        if read is None or read.digest in self._done:
            connection.post(lambda: channel.ack(delivered.tag))
            return
        taken = read.messages[:room]
        if taken:
            open_lease()
        # There is no room for the rest: it comes again, behind the others.
        rests = list(bundles.grouped(read.messages[room:], self._bundler.capacity))
        self.left += len(rests)
        self._buffer.add_under_way(len(taken))
        connection.post(lambda: self._secure(channel, delivered.tag, read, taken, rests))

    def _next(self, connection: ConnectionThread, getter: Getter) -> Delivered | None:
        try:
            return getter.next(_ANSWER_TIMEOUT)
        except ProducerUnavailable as error:
            if connection.lost is not None:
                raise
            log.warning("The returns queue %r does not answer: %s.", self._queue, error)
            return None

    def _move_away(
        self,
        connection: ConnectionThread,
        channel: ConfirmChannel,
        delivered: Delivered,
        reason: str,
    ) -> None:
        """Move what cannot be read out of the way, and say so."""
        place = self._topology.queues.quarantine
        self._topology.standing.ensure_quarantine(connection)
        log.error(
            "What lay in %r cannot be read, and is moved to %r: %s.",
            self._queue,
            place,
            reason,
            extra={"code": "bundle_unreadable"},
        )
        connection.post(lambda: self._quarantine.unreadable(channel, place, delivered, reason))

    # -- in the connection's thread ------------------------------------------------------------

    def _secure(
        self,
        channel: ConfirmChannel,
        tag: int,
        read: ReturnedBundle,
        messages: list[Held],
        rests: list[list[Held]],
    ) -> None:
        """Publish what becomes of a bundle, then acknowledge it."""
        for part in rests:
            name = self._ids.fresh()
            body = bundles.pack(read.header.released_part(name, len(part)), part)
            properties = encode({"delivery_mode": 2, "message_id": name})
            channel.publish("", self._queue, properties, body, key=name)
        taken = [held._replace(message_id=self._ids.returned(held.message_id)) for held in messages]
        *others, last = [*bundles.grouped(taken, self._bundler.capacity)] or [[]]
        for part in others:
            self._bundler.publish(channel, part, None)
        if last:  # relied on only when those before it are
            self._taken[id(last)] = read.digest
            self._bundler.publish(channel, last, tag)
        else:  # all of it was settled at once
            channel.ack(tag)

    def _secured(self, loads: list[Any]) -> None:
        """Bundles may be relied on; what they were made of is about to be acknowledged."""
        for load in loads:
            if id(load) in self._taken:
                self._note_done(self._taken.pop(id(load)))
        self._ids.secured(loads)
        self._buffer.add(loads)

    def _note_done(self, digest: bytes) -> None:
        if len(self._done) >= _MAX_DONE:
            del self._done[next(iter(self._done))]
        self._done[digest] = None

    def _failed(self, error: BroadwayError) -> None:
        if isinstance(error, Refused) and error.code == 404:  # deleted: nothing comes back from it
            error = ProducerUnavailable(f"the returns queue {self._queue!r}: {error.text}")
        self._buffer.fail(error)
