"""Consumes the source queue, packs deliveries into bundles and publishes these.

All of it runs in the connection's thread, while the run's own thread handles secured messages.  The
demand of the last ``receive`` limits how far it runs ahead.  Further deliveries stay
unacknowledged; they are requeued at the end, or when the run has no demand for a while.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq import marks
from airflow_broadway.producers.rabbitmq.amqp.channels import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Channel
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.bundle import MAGIC, Held, contents
from airflow_broadway.producers.rabbitmq.receive.intake import Intake, Quarantined

log = logging.getLogger(__name__)

#: Seconds without demand after which the backlog is requeued: the broker closes the channel of a
#: consumer that leaves a delivery unacknowledged for too long.
DEMAND_TIMEOUT = 10.0
#: Seconds from a bundle's first message until it is published unfilled.
LINGER_SECONDS = 0.02


class Consumer:
    """The source queue's consumer on one connection.

    The properties are for any thread, the constructor and :meth:`journal_read` for the run's
    thread.  All other methods are for the connection's thread.

    :param slow: Whether callbacks are so slow that no delivery may wait unacknowledged.
    """

    def __init__(self, channel: Channel, intake: Intake, *, slow: bool) -> None:
        options, generation = intake.options, intake.env.generation
        self.channel = channel
        self.confirm_channel = ConfirmChannel(
            channel,
            before_ack=self._before_ack,
            secured=self._secured,
            failed=intake.buffer.fail,
            destination=f"the holding queue of generation {generation}",
            key_of=marks.publication_key,
        )
        self._intake = intake
        self._max_bytes = options.max_message_bytes
        self._ids = intake.ids
        self._buffer = intake.buffer
        self._open = bool(intake.holding_queue)
        #: Whether consuming has ended without an error.
        self.stopped = False
        #: The generation whose journal must be read next, if any: see :meth:`journal_read`.  The
        #: connection's thread, which sends heartbeats, does not read it.
        self.wants_journal = ""
        self._bundle = OpenBundle(intake, self.confirm_channel)
        self._subscription = Subscription(intake, self.confirm_channel, slow=slow)
        #: Deliveries that are not packed into a bundle yet.
        self.backlog = self._subscription.backlog
        channel.connection.post(lambda: self._subscription.attach(self._pump))

    # -- for the run's thread ------------------------------------------------------------------

    @property
    def may_be_stream(self) -> bool:
        """Whether the first delivery has the header of a stream."""
        return bool(self.backlog) and b"x-stream-offset" in self.backlog[0].properties

    def journal_read(self) -> None:
        """Resumes after the wanted journal was read."""
        self.wants_journal = ""
        self.channel.connection.post(self._pump)

    # -- in the connection's thread ------------------------------------------------------------

    def open(self) -> None:
        """Resumes after the holding queue was opened."""
        self._open = True
        self._pump()

    def want(self, demand: int) -> None:
        """Consumes and packs deliveries, as far as the buffer has credit."""
        if not self.stopped and self.confirm_channel.failure is None:
            buffer = self._buffer
            missing = buffer.credit - buffer.under_way - len(self.backlog)
            self._subscription.want(demand, missing)
            self._pump()

    def stop(self) -> None:
        """Cancels the consumer and publishes the open bundle.  The backlog is requeued later."""
        self.stopped = True
        self._subscription.cancel()
        if self.confirm_channel.failure is None and self._open:
            self._bundle.publish()

    def _pump(self) -> None:
        """Packs deliveries as far as possible.  Called after each chunk of data and each demand."""
        backlog, buffer = self.backlog, self._buffer
        if not backlog and not self._bundle.messages:
            return
        if not self._open or self.confirm_channel.failure is not None:
            buffer.notify()
            return
        room = 0 if self.stopped else buffer.claim(len(backlog))
        taken = self._pack(room)
        if taken < room:
            buffer.unclaim(room - taken)
        if self.wants_journal:
            buffer.notify()
        if not self._bundle.messages:
            return
        if buffer.full or self.stopped:
            self._bundle.publish()
        else:
            self._bundle.publish_soon()

    def _pack(self, room: int) -> int:
        """Processes up to ``room`` deliveries; returns how many became messages."""
        backlog, bundle, fresh = self.backlog, self._bundle, self._ids.fresh
        max_bytes = self._max_bytes
        taken = 0
        for _ in range(room):
            delivered = backlog[0]
            tag, redelivered, route, properties, body = delivered
            mark = marks.mark_of(properties)
            if mark is not None and not mark.belongs_to(delivered):
                mark, redelivered = None, True  # a header copied from another message
            if mark is not None and not self._may_receive(mark):
                break
            backlog.popleft()
            if len(body) > max_bytes:
                reason = (
                    f"its body has {len(body)} bytes, more than max_message_bytes ({max_bytes})"
                )
                self._quarantine(delivered, "oversized", reason)
                continue
            if body[:4] == MAGIC and (bundle_of := contents(body)):
                # It was moved here.  It is not unpacked: any publisher can forge a bundle.
                reason = f"it is {bundle_of}: move it back into its holding queue, as it is"
                self._quarantine(delivered, "bundle", reason)
                continue
            weight = len(body) + len(properties) + len(route) + (64 if mark is None else 256)
            if mark is None:
                bundle.add(Held(fresh(), 1, redelivered, route, properties, body), weight, tag)
            else:
                message = self._restore(mark, delivered)
                if message is None:
                    bundle.add_repetition(tag)
                    continue
                bundle.add(message, weight, tag)
            taken += 1
        bundle.publish_full()
        return taken

    def _may_receive(self, mark: marks.Mark) -> bool:
        """Whether this generation may receive a message with this mark, and its journal is read."""
        if mark.released_by == self._intake.env.generation:
            self.stopped = True
            self._subscription.give_up()
            return False
        if self._intake.turns.of(mark.released_by) is None:
            self.wants_journal = mark.released_by
            return False
        return True

    def _restore(self, mark: marks.Mark, delivered: Delivered) -> Held | None:
        """Restores a republished message; ``None`` if it is a duplicate of a received one.

        Only settlements publish duplicates: each turn publishes a message once, and the journal of
        the generation that released it lists the turns.  Any other copy is a message of its own.
        """
        body = delivered.body
        turns = self._intake.turns.of(mark.released_by) or ()
        try:
            route, properties = marks.restored(
                delivered.route, delivered.properties, trusted=mark.turn in turns
            )
        except ProducerError:  # not a mark of ours: an ordinary message
            return Held(self._ids.fresh(), 1, True, delivered.route, delivered.properties, body)
        content = hash((mark.released_by, mark.attempt, route, properties, body))
        message_id = self._ids.marked(mark.message_id, content, mark.turn, turns)
        if message_id is None:
            return None
        return Held(message_id, mark.attempt, True, route, properties, body)

    def _quarantine(self, delivered: Delivered, kind: str, reason: str) -> None:
        """Dead-letters a message that no callback can handle."""
        self._bundle.publish()  # first: the dead letter's confirm acknowledges all earlier ones
        key = self._ids.fresh()
        properties = marks.dead_lettered(
            delivered,
            marks.Mark(key, self._intake.env.generation, 1),
            reason=reason,
            stage="receive",
            source=self._intake.options.queue,
            now=self._intake.env.clock.now(),
            limit=self.channel.connection.max_properties,
        )
        self.confirm_channel.publish(
            *self._intake.queues.dead_for(delivered.route),
            properties,
            delivered.body,
            key=key,
            tag=delivered.tag,
            load=Quarantined(key, kind, reason),
            elsewhere=True,
        )

    def _before_ack(self) -> None:
        self._subscription.cancel_if_exact()

    def _secured(self, loads: list[Any]) -> None:
        self._ids.secured(loads)
        self._buffer.add(loads)


class OpenBundle:
    """The bundle that is filled on a channel; for the connection's thread."""

    def __init__(self, intake: Intake, channel: ConfirmChannel) -> None:
        self._intake = intake
        self._channel = channel
        self._timer: Any = None
        #: The messages in it; read-only for others.
        self.messages: list[Held] = []
        self._bytes = 0
        #: The delivery tag to acknowledge, with all earlier ones, when this bundle is secured.
        self._tag: int | None = None

    def add(self, message: Held, weight: int, tag: int) -> None:
        """Adds a message; a full bundle is published first."""
        full = self._bytes + weight > self._intake.capacity
        if full or len(self.messages) >= bundles.MAX_MESSAGES:
            self.publish()
        self.messages.append(message)
        self._bytes += weight
        self._tag = tag

    def add_repetition(self, tag: int) -> None:
        """Adds a duplicate: its delivery is acknowledged together with the earlier ones."""
        self._tag = tag

    def publish_full(self) -> None:
        """Publishes a full bundle; acknowledges duplicates if there is nothing else."""
        if len(self.messages) >= bundles.MAX_MESSAGES:
            self.publish()
        elif self._tag is not None and not self.messages:
            tag, self._tag = self._tag, None
            self._channel.done(tag)

    def publish_soon(self) -> None:
        """Publishes the bundle after a short delay, in which more messages may arrive."""
        if self._timer is None:
            ioloop = self._channel.channel.connection.raw.ioloop
            self._timer = ioloop.call_later(LINGER_SECONDS, self._publish_after_linger)

    def publish(self) -> None:
        """Publishes the bundle, unless it is empty, and begins another."""
        messages, tag = self.messages, self._tag
        self.messages, self._bytes, self._tag = [], 0, None
        if messages:
            self._intake.publish(self._channel, messages, tag)

    def _publish_after_linger(self) -> None:
        self._timer = None
        if self._channel.failure is None:
            self.publish()


class Subscription:
    """An AMQP consumer on a channel, and its backlog; for the connection's thread.

    :param slow: Whether callbacks are so slow that no delivery may wait unacknowledged.
    """

    def __init__(self, intake: Intake, confirms: ConfirmChannel, *, slow: bool) -> None:
        options = intake.options
        #: Deliveries that are not packed into a bundle yet.
        self.backlog: deque[Delivered] = deque()
        self._confirms = confirms
        self._channel = confirms.channel
        self._queue = options.queue
        self._prefetch = options.qos.prefetch_count
        self._arguments = dict(options.consume_options or {})
        tag = self._arguments.pop("consumer_tag", None)
        self._tag_prefix = tag or f"broadway-{intake.ids.prefix}"
        self._slow = slow
        self._tag: str | None = None  # of the current consumer
        self._consumers = 0
        # The consumer's prefetch count, and whether it is the exact number of wanted deliveries.
        self._bound = 0
        self._exact = False
        self._demands = 0
        self._idle_timer: Any = None

    def attach(self, after_data: Callable[[], None]) -> None:
        """Registers for deliveries; ``after_data`` is called after each chunk of data."""
        frames, number = self._channel.connection.raw.frames, self._channel.number
        frames.on_delivery(number, self.backlog.append)
        frames.after_data = after_data
        self._channel.raw.add_on_cancel_callback(self._on_cancelled)

    def want(self, demand: int, missing: int) -> None:
        """Consumes continuously, or for a small demand exactly the missing number of deliveries.

        Only a continuous consumer leaves a backlog, which is requeued at the end.

        :param missing: The number of deliveries still missing.  The demand itself may have been met
            since it was requested.
        """
        self._demands += 1
        ioloop = self._channel.connection.raw.ioloop
        if self._idle_timer is not None:
            ioloop.remove_timeout(self._idle_timer)
        self._idle_timer = ioloop.call_later(DEMAND_TIMEOUT, self._on_idle)
        stream = demand >= self._prefetch and not self._slow
        if self._tag is not None and not stream and self._bound > max(0, missing):
            self.cancel()
        if self._tag is None and missing > 0:
            self._exact = not stream
            self._consume(self._prefetch if stream else missing)

    def _consume(self, bound: int) -> None:
        self._bound = bound
        self._consumers += 1
        self._tag = f"{self._tag_prefix}.{self._consumers}"
        self._channel.raw.basic_qos(prefetch_count=bound)
        self._channel.raw.basic_consume(
            self._queue,
            lambda *_: None,  # the parser takes deliveries before pika sees them
            consumer_tag=self._tag,
            **self._arguments,
        )

    def cancel(self, then: Callable[[Any], None] | None = None) -> None:
        """Cancels the consumer; ``then`` is called after its last delivery."""
        if self._tag is not None and self._channel.raw.is_open:
            tag, self._tag = self._tag, None
            self._channel.raw.basic_cancel(tag, callback=then)
        elif then is not None:
            then(None)

    def cancel_if_exact(self) -> None:
        """Cancels the consumer unless it is continuous.

        To be called before an ack, which would let the broker send deliveries without demand.
        """
        if self._exact:
            self.cancel()

    def give_up(self) -> None:
        """Cancels the consumer and requeues the backlog."""
        self.cancel(lambda _: self._requeue_backlog())

    def _on_idle(self) -> None:
        """Cancels the consumer and requeues the backlog, after a while without demand."""
        self._idle_timer = None
        if self._tag is None and not self.backlog:
            return
        if not self._slow:
            self._slow = True
            log.info("Callbacks are slow: from now on messages are received on demand.")
        demands = self._demands
        self.cancel(lambda _: self._requeue_backlog() if demands == self._demands else None)

    def _requeue_backlog(self) -> None:
        tags = [delivered.tag for delivered in self.backlog]
        self.backlog.clear()
        self._confirms.requeue(tags)

    def _on_cancelled(self, frame: Any) -> None:
        if frame.method.consumer_tag == self._tag:
            self._tag = None
            self._confirms.fail(
                ProducerUnavailable(
                    f"RabbitMQ ended the consumer of {self._queue!r}: the queue was deleted, or"
                    " moved to another node"
                )
            )
