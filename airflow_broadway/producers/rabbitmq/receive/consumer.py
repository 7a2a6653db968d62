"""Takes deliveries from the source queue, packs them in bundles and secures these.

All of it happens in the link's thread, while the run's own thread handles what was secured before.
How far it may run ahead is the demand of the last ``receive``; what the broker delivers beyond that
stays unacknowledged, and goes back in the end, or when the run asks for nothing for a while.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import Channel
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered, Parser
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.marks import (
    Mark,
    buried,
    is_of,
    mark_of,
    publication_key,
    restored,
)
from airflow_broadway.producers.rabbitmq.receive.bundler import Aside, Bundler, Ready

__all__ = ["Consumer"]

log = logging.getLogger(__name__)

#: Seconds from a bundle's first message until it is published unfilled.
LINGER = 0.02
#: Seconds without a demand after which deliveries go back that nobody has asked for: the broker
#: closes the channel of a consumer that leaves one unacknowledged for too long.
SLOW = 10.0


class Consumer:
    """The source queue's consumer; all but the constructor is for the link's thread.

    :param max_bytes: A message with a larger body is set aside as a dead letter.
    :param dead: Exchange and routing key of dead letters.
    :param consume: More arguments of ``basic.consume``.
    :param slow: Whether the run's callbacks take so long that nothing may wait for them here.
    """

    def __init__(
        self,
        channel: Channel,
        ready: Ready,
        sealer: Bundler,
        *,
        prefetch: int,
        max_bytes: int,
        dead: tuple[str, str],
        consume: dict[str, Any],
        slow: bool = False,
    ) -> None:
        self.channel = channel
        self.backlog: deque[Delivered] = deque()
        #: Why nothing more is taken, without its being an error: ``"own"``, ``"stop"``.
        self.stopped = ""
        self.slow = slow
        self.open = False  # whether bundles have a queue to go to
        #: The generation whose turns must be known before more is taken: its journal is not read
        #: in the link's thread, which keeps the connection alive.
        self.unknown = ""
        self._ready = ready
        self._sealer = sealer
        self._prefetch = prefetch
        self._max_bytes = max_bytes
        self._dead = dead
        self._consume = dict(consume)
        self._tag_name = self._consume.pop("consumer_tag", None) or f"broadway-{sealer.ids.prefix}"
        self._consumer: str | None = None
        self._consumers = 0
        self._exact = False
        self._bound = 0
        self._pending: list[Held] = []
        self._pending_bytes = 0
        self._pending_tag: int | None = None
        self._timer: Any = None
        self._idle_timer: Any = None
        self._asked = 0
        self.lane = ConfirmChannel(
            channel,
            multiple=True,
            secured=self._secured,
            failed=ready.fail,
            what=f"the lease queue of generation {sealer.generation}",
            key_of=publication_key,
        )
        raw, link = channel.raw, channel.link
        parser = Parser(channel.number, self.backlog.append)

        def attach() -> None:
            link.raw.parsers[channel.number] = parser
            link.raw.after_data = self.pump
            raw.add_on_cancel_callback(self._cancelled)

        link.post(attach)

    # -- consuming -----------------------------------------------------------------------------

    def want(self, demand: int) -> None:
        """See to it that deliveries come: a stream of them, or for a small demand just so many.

        Only a stream can leave deliveries unused; they go back to the queue in the end.
        """
        if self.stopped or self.lane.failure is not None:
            return
        self._asked += 1
        if self._idle_timer is not None:
            self.channel.link.raw.ioloop.remove_timeout(self._idle_timer)
        self._idle_timer = self.channel.link.raw.ioloop.call_later(SLOW, self._not_asked)
        stream = demand >= self._prefetch and not self.slow
        # Not the demand itself: it may have been met while this call was on its way.
        missing = self._ready.credit - self._ready.outstanding - len(self.backlog)
        if self._consumer is not None and not stream and self._bound > max(0, missing):
            self._cancel()
        if self._consumer is None and missing > 0:
            self._exact = not stream
            self._bound = self._prefetch if stream else missing
            self._consumers += 1
            self._consumer = f"{self._tag_name}.{self._consumers}"
            self.channel.raw.basic_qos(prefetch_count=self._bound)
            self.channel.raw.basic_consume(
                self._sealer.queues.source,
                lambda *_: None,  # the parser takes deliveries before pika sees them
                consumer_tag=self._consumer,
                **self._consume,
            )
        self.pump()

    def _cancel(self, then: Callable[[Any], None] | None = None) -> None:
        """End the consumer; ``then`` is called when nothing more of it can come."""
        if self._consumer is not None and self.channel.raw.is_open:
            consumer, self._consumer = self._consumer, None
            self.channel.raw.basic_cancel(consumer, callback=then)
        elif then is not None:
            then(None)

    def _not_asked(self) -> None:
        """The run has asked for nothing for a while: let others have what waits here."""
        self._idle_timer = None
        if self._consumer is None and not self.backlog:
            return
        if not self.slow:
            self.slow = True
            log.info("Callbacks take their time: messages are received as they are asked for.")
        asked = self._asked
        self._cancel(lambda _: self._give_back() if asked == self._asked else None)

    def _give_back(self) -> None:
        """Have the broker deliver to others what nobody has asked for."""
        tags = [delivered.tag for delivered in self.backlog]
        self.backlog.clear()
        self.lane.give_back(tags)

    def _secured(self, loads: list[Any]) -> None:
        if self._exact:
            # Before the acknowledgement: it would make room for deliveries nobody asked for.
            self._cancel()
        self._sealer.ids.secured(loads)
        self._ready.add(loads)

    def _cancelled(self, frame: Any) -> None:
        if frame.method.consumer_tag == self._consumer:
            self._consumer = None
            self.lane.fail(
                ProducerUnavailable(
                    f"RabbitMQ ended the consumer of {self._sealer.queues.source!r}: the queue was"
                    " deleted, or moved to another node"
                )
            )

    # -- taking --------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what may be taken.  Called after every portion of data, and when demand rises."""
        ready = self._ready
        if not self.backlog and not self._pending:
            return
        if not self.open or self.lane.failure is not None:
            with ready.changed:
                ready.changed.notify()
            return
        with ready.changed:
            room = 0 if self.stopped else min(len(self.backlog), ready.credit - ready.outstanding)
            room = max(room, 0)
            ready.outstanding += room
        unused = room - self._take(room)
        with ready.changed:
            ready.outstanding -= unused
            full = ready.outstanding >= ready.credit
            if self.unknown:
                ready.changed.notify()
        if self._pending:
            self._seal_in_time(now=full or bool(self.stopped))

    def _take(self, room: int) -> int:
        """Move ``room`` deliveries into bundles; how many became messages."""
        backlog, pending = self.backlog, self._pending
        sealer, ids = self._sealer, self._sealer.ids
        size, limit, most = self._pending_bytes, sealer.capacity, self._largest()
        taken = 0
        for _ in range(room):
            delivered = backlog[0]
            tag, redelivered, route, properties, body = delivered
            mark = mark_of(properties)
            if mark is not None and is_of(mark, delivered):
                if mark.giver == sealer.generation:
                    self.stopped = "own"
                    self._cancel(lambda _: self._give_back())
                    break
                if sealer.turns.of(mark.giver) is None:
                    self.unknown = mark.giver
                    break
            elif mark is not None:  # another message's header: a message like any other
                mark, redelivered = None, True
            backlog.popleft()
            weight = len(body) + len(properties) + len(route) + (64 if mark is None else 256)
            if pending and (size + weight > limit or len(pending) >= bundles.MAX_MESSAGES):
                self._seal()
                pending, size = self._pending, 0
            if len(body) > self._max_bytes or weight > most:
                if pending:
                    self._seal()
                    pending, size = self._pending, 0
                self._set_aside(delivered)
                self._pending_tag = None  # done with when this is
                continue
            if mark is None:
                held = Held(ids.fresh(), 1, 0, redelivered, route, properties, body)
            else:
                again = self._marked(mark, delivered)
                if again is None:  # the same once more: done with when what came before is
                    self._pending_tag = tag
                    continue
                held = again
            pending.append(held)
            size += weight
            taken += 1
            self._pending_tag = tag
        self._pending_bytes = size
        if len(pending) >= bundles.MAX_MESSAGES:
            self._seal()
        elif self._pending_tag is not None and not pending:
            # Nothing but repetitions since the last bundle: done with when that is.
            tag, self._pending_tag = self._pending_tag, None
            if not self.lane.window.extend(tag) and self.channel.raw.is_open:
                self.channel.raw.basic_ack(tag, multiple=True)
        return taken

    def _largest(self) -> int:
        """Bytes that a message may have in its bundle."""
        largest = self._sealer.largest
        return sys.maxsize if largest is None else largest

    def _marked(self, mark: Mark, delivered: Delivered) -> Held | None:
        """A message that was published again; ``None`` if this generation has it already.

        A repetition is only what settling can have made: each turn of it publishes a message once,
        and the journal of who gave it back names the turns.  All else is a message of its own.
        """
        ids, body = self._sealer.ids, delivered.body
        turns = self._sealer.turns.of(mark.giver) or ()
        try:
            route, properties = restored(
                delivered.route, delivered.properties, trusted=mark.turn in turns
            )
        except ProducerError:  # no mark of ours: a message like any other
            return Held(ids.fresh(), 1, 0, True, delivered.route, delivered.properties, body)
        print_ = hash((mark.giver, mark.attempt, route, properties, body))
        message_id = ids.marked(mark.message_id, print_, mark.turn, turns)
        if message_id is None:
            return None
        return Held(message_id, mark.attempt, 0, True, route, properties, body)

    def _set_aside(self, delivered: Delivered) -> None:
        key, size = self._sealer.ids.fresh(), len(delivered.body)
        if size > self._max_bytes:
            reason = f"its body has {size} bytes, more than max_message_bytes ({self._max_bytes})"
        else:
            reason = (
                f"with {size} bytes it fits no bundle, for which RabbitMQ's max_message_size"
                f" leaves {self._largest()}"
            )
        exchange, routing_key = self._dead
        self.lane.publish(
            exchange,
            routing_key,
            buried(
                delivered,
                Mark(key, self._sealer.generation, 1),
                reason=reason,
                stage="receive",
                limit=self.channel.link.max_properties,
            ),
            delivered.body,
            key=key,
            tag=delivered.tag,
            load=Aside(key, "oversized", reason),
        )

    # -- sealing -------------------------------------------------------------------------------

    def _seal_in_time(self, *, now: bool) -> None:
        if now:
            self._seal()
        elif self._timer is None:
            self._timer = self.channel.link.raw.ioloop.call_later(LINGER, self._late)

    def _late(self) -> None:
        self._timer = None
        if self._pending and self.lane.failure is None:
            self._seal()

    def _seal(self) -> None:
        if not self._pending:
            return
        messages, tag = self._pending, self._pending_tag
        self._pending, self._pending_bytes, self._pending_tag = [], 0, None
        self._sealer.publish(self.lane, messages, tag)

    def stop(self) -> None:
        """Take nothing more, and publish what was taken.  What is in the backlog goes back."""
        self.stopped = self.stopped or "stop"
        self._cancel()
        if self.lane.failure is None and self.open:
            self._seal()
