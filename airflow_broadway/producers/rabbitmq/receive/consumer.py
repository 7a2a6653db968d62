"""Takes deliveries from the source queue, packs them in bundles and has these secured.

All of it happens in the connection's thread, while the run's own thread handles what was secured
before.  How far it may run ahead is the demand of the last ``receive``; what the broker delivers
beyond that stays unacknowledged, and goes back in the end, or when the run asks for nothing for a
while.
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
from airflow_broadway.producers.rabbitmq.receive.intake import Aside, Intake

log = logging.getLogger(__name__)

#: Seconds without a demand after which deliveries go back that nobody has asked for: the broker
#: closes the channel of a consumer that leaves one unacknowledged for too long.
DEMAND_TIMEOUT = 10.0
#: Seconds from a bundle's first message until it is published unfilled.
LINGER_SECONDS = 0.02


class Consumer:
    """The source queue's consumer on one connection.

    The properties are for any thread, :meth:`journal_read` and the constructor for the run's; all
    else is for the connection's.

    :param slow: Whether callbacks take so long that nothing may wait here.
    """

    def __init__(self, channel: Channel, intake: Intake, *, slow: bool) -> None:
        options, generation = intake.options, intake.env.generation
        self.channel = channel
        self.confirm_channel = ConfirmChannel(
            channel,
            secured=self._secured,
            failed=intake.buffer.fail,
            what=f"the holding queue of generation {generation}",
            key_of=marks.publication_key,
        )
        self._intake = intake
        self._max_bytes = options.max_message_bytes
        self._ids = intake.ids
        self._buffer = intake.buffer
        self._open = bool(intake.holding_queue)
        #: Whether it takes nothing more, without its being an error.
        self.stopped = False
        #: The generation whose journal is to be read, if any: see :meth:`journal_read`.  It is not
        #: read in the connection's thread, which keeps the connection alive.
        self.wants_journal = ""
        self._bundle = OpenBundle(intake, self.confirm_channel)
        self._subscription = Subscription(intake, self.confirm_channel, slow=slow)
        #: Deliveries that came and are not taken.
        self.backlog = self._subscription.backlog
        channel.connection.post(lambda: self._subscription.attach(self._pump))

    # -- what it waits for ---------------------------------------------------------------------

    @property
    def may_be_stream(self) -> bool:
        """Whether the first delivery is one of a stream."""
        return bool(self.backlog) and b"x-stream-offset" in self.backlog[0].properties

    def journal_read(self) -> None:
        """Go on, now that the wanted journal is read."""
        self.wants_journal = ""
        self.channel.connection.post(self._pump)

    # -- in the connection's thread ------------------------------------------------------------

    def open(self) -> None:
        """Go on, now that there is a holding queue."""
        self._open = True
        self._pump()

    def want(self, demand: int) -> None:
        """See to it that deliveries come and are taken, as far as the buffer has credit."""
        if not self.stopped and self.confirm_channel.failure is None:
            buffer = self._buffer
            missing = buffer.credit - buffer.under_way - len(self.backlog)
            self._subscription.want(demand, missing)
            self._pump()

    def stop(self) -> None:
        """Take nothing more, and publish what was taken.  What is in the backlog goes back."""
        self.stopped = True
        self._subscription.cancel()
        if self.confirm_channel.failure is None and self._open:
            self._bundle.publish()

    def _pump(self) -> None:
        """Take what may be taken.  Called after every portion of data, and when demand rises."""
        backlog, buffer = self.backlog, self._buffer
        if not backlog and not self._bundle.messages:
            return
        if not self._open or self.confirm_channel.failure is not None:
            buffer.notify()
            return
        room = 0 if self.stopped else buffer.claim(len(backlog))
        taken = self._take(room)
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

    def _take(self, room: int) -> int:
        """Move ``room`` deliveries into bundles; how many became messages."""
        backlog, bundle, fresh = self.backlog, self._bundle, self._ids.fresh
        max_bytes = self._max_bytes
        taken = 0
        for _ in range(room):
            delivered = backlog[0]
            tag, redelivered, route, properties, body = delivered
            mark = marks.mark_of(properties)
            if mark is not None and not mark.belongs_to(delivered):
                mark, redelivered = None, True  # another message's header: a message like any other
            if mark is not None and not self._may_take(mark):
                break
            backlog.popleft()
            if len(body) > max_bytes:
                reason = (
                    f"its body has {len(body)} bytes, more than max_message_bytes ({max_bytes})"
                )
                self._quarantine(delivered, "oversized", reason)
                continue
            if body[:4] == MAGIC and (bundle_of := contents(body)):
                # It was moved here; it is not unpacked: any sender can make one.
                reason = f"it is {bundle_of}: move it back into its holding queue, as it is"
                self._quarantine(delivered, "bundle", reason)
                continue
            weight = len(body) + len(properties) + len(route) + (64 if mark is None else 256)
            if mark is None:
                bundle.add(Held(fresh(), 1, redelivered, route, properties, body), weight, tag)
            else:
                held = self._marked(mark, delivered)
                if held is None:
                    bundle.add_repetition(tag)
                    continue
                bundle.add(held, weight, tag)
            taken += 1
        bundle.publish_full()
        return taken

    def _may_take(self, mark: marks.Mark) -> bool:
        """Whether a message with this mark is for this generation, and can be judged now."""
        if mark.released_by == self._intake.env.generation:
            self.stopped = True
            self._subscription.give_up()
            return False
        if self._intake.turns.of(mark.released_by) is None:
            self.wants_journal = mark.released_by
            return False
        return True

    def _marked(self, mark: marks.Mark, delivered: Delivered) -> Held | None:
        """Returns a released message as it was before; ``None`` if it is here already.

        A repetition is only what settling can have made: each turn of it publishes a message once,
        and the journal of the generation that released it names the turns.  All else is a message
        of its own.
        """
        body = delivered.body
        turns = self._intake.turns.of(mark.released_by) or ()
        try:
            route, properties = marks.restored(
                delivered.route, delivered.properties, trusted=mark.turn in turns
            )
        except ProducerError:  # no mark of ours: a message like any other
            fresh = self._ids.fresh()
            return Held(fresh, 1, True, delivered.route, delivered.properties, body)
        content = hash((mark.released_by, mark.attempt, route, properties, body))
        message_id = self._ids.marked(mark.message_id, content, mark.turn, turns)
        if message_id is None:
            return None
        return Held(message_id, mark.attempt, True, route, properties, body)

    def _quarantine(self, delivered: Delivered, kind: str, reason: str) -> None:
        """Makes a dead letter of a message that no callback can handle."""
        self._bundle.publish()  # first: what follows acknowledges all before it
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
            load=Aside(key, kind, reason),
            elsewhere=True,
        )

    def _secured(self, loads: list[Any]) -> None:
        self._subscription.cancel_if_exact()
        self._ids.secured(loads)
        self._buffer.add(loads)


class OpenBundle:
    """The bundle that is being filled on a channel; for the connection's thread."""

    def __init__(self, intake: Intake, channel: ConfirmChannel) -> None:
        self._intake = intake
        self._channel = channel
        self._timer: Any = None
        #: What is in it; to be read only.
        self.messages: list[Held] = []
        self._bytes = 0
        #: The delivery up to which all is done with once this bundle is secured.
        self._tag: int | None = None

    def add(self, held: Held, weight: int, tag: int) -> None:
        """Put a message in; a full bundle is published, and another begun."""
        full = self._bytes + weight > self._intake.capacity
        if full or len(self.messages) >= bundles.MAX_MESSAGES:
            self.publish()
        self.messages.append(held)
        self._bytes += weight
        self._tag = tag

    def add_repetition(self, tag: int) -> None:
        """Note a message that came before: its delivery is done with when all up to it is."""
        self._tag = tag

    def publish_full(self) -> None:
        """Publish it if it is full; if there were repetitions alone, have them acknowledged."""
        if len(self.messages) >= bundles.MAX_MESSAGES:
            self.publish()
        elif self._tag is not None and not self.messages:
            tag, self._tag = self._tag, None
            self._channel.done(tag)

    def publish_soon(self) -> None:
        """Publish it when more messages have had a moment to come."""
        if self._timer is None:
            ioloop = self._channel.channel.connection.raw.ioloop
            self._timer = ioloop.call_later(LINGER_SECONDS, self._linger_over)

    def publish(self) -> None:
        """Publish it, if there is a message in it, and begin another."""
        messages, tag = self.messages, self._tag
        self.messages, self._bytes, self._tag = [], 0, None
        if messages:
            self._intake.publish(self._channel, messages, tag)

    def _linger_over(self) -> None:
        self._timer = None
        if self._channel.failure is None:
            self.publish()


class Subscription:
    """AMQP's consumer on a channel, and the deliveries that wait; for the connection's thread.

    :param slow: Whether callbacks take so long that nothing may wait here.
    """

    def __init__(self, intake: Intake, confirms: ConfirmChannel, *, slow: bool) -> None:
        options = intake.options
        #: What came and nobody has taken yet.
        self.backlog: deque[Delivered] = deque()
        self._confirms = confirms
        self._channel = confirms.channel
        self._queue = options.queue
        self._prefetch = options.qos.prefetch_count
        self._arguments = dict(options.consume_options or {})
        tag = self._arguments.pop("consumer_tag", None)
        self._tag_prefix = tag or f"broadway-{intake.ids.prefix}"
        self._slow = slow
        self._tag: str | None = None  # of the consumer that there is now
        self._consumers = 0
        # Deliveries that the consumer may have unacknowledged, and whether no more are wanted.
        self._bound = 0
        self._exact = False
        self._demands = 0
        self._idle_timer: Any = None

    def attach(self, after_data: Callable[[], None]) -> None:
        """Take deliveries from now on; ``after_data`` is called after every portion of data."""
        frames, number = self._channel.connection.raw.frames, self._channel.number
        frames.on_delivery(number, self.backlog.append)
        frames.after_data = after_data
        self._channel.raw.add_on_cancel_callback(self._on_cancelled)

    def want(self, demand: int, missing: int) -> None:
        """See to it that deliveries come: a stream of them, or for a small demand just so many.

        Only a stream can leave deliveries unused; they go back to the queue in the end.

        :param missing: How many are to come yet.  Not the demand itself: it may have been met while
            this call was on its way.
        """
        self._demands += 1
        ioloop = self._channel.connection.raw.ioloop
        if self._idle_timer is not None:
            ioloop.remove_timeout(self._idle_timer)
        self._idle_timer = ioloop.call_later(DEMAND_TIMEOUT, self._not_wanted)
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
        """End the consumer; ``then`` is called when nothing more of it can come."""
        if self._tag is not None and self._channel.raw.is_open:
            tag, self._tag = self._tag, None
            self._channel.raw.basic_cancel(tag, callback=then)
        elif then is not None:
            then(None)

    def cancel_if_exact(self) -> None:
        """End the consumer unless it is a stream.

        To be called before an acknowledgement, which would make room for deliveries that nobody has
        asked for.
        """
        if self._exact:
            self.cancel()

    def give_up(self) -> None:
        """End the consumer, and let others have what waits here."""
        self.cancel(lambda _: self._requeue_backlog())

    def _not_wanted(self) -> None:
        """The run has asked for nothing for a while: let others have what waits here."""
        self._idle_timer = None
        if self._tag is None and not self.backlog:
            return
        if not self._slow:
            self._slow = True
            log.info("Callbacks take their time: messages are received as they are asked for.")
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
