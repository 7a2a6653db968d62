"""Takes deliveries from the source queue, packs them in bundles and secures these.

All of it happens in the link's thread, while the run's own thread handles what was secured before.
How far it may run ahead is the demand of the last ``receive``; what the broker delivers beyond that
stays unacknowledged and goes back in the end.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.lane import Lane
from airflow_broadway.producers.rabbitmq.link import Channel
from airflow_broadway.producers.rabbitmq.properties import (
    Mark,
    mark_of,
    republished,
)
from airflow_broadway.producers.rabbitmq.sealing import Ready, Sealer
from airflow_broadway.producers.rabbitmq.wire import Delivered, Parser

__all__ = ["Intake"]

#: Seconds from a bundle's first message until it is published unfilled.
LINGER = 0.02


class Intake:
    """The source queue's consumer; all but the constructor is for the link's thread.

    :param max_bytes: A message with a larger body is set aside as a dead letter.
    :param dead: Exchange and routing key of dead letters.
    :param consume: More arguments of ``basic.consume``.
    """

    def __init__(
        self,
        channel: Channel,
        ready: Ready,
        sealer: Sealer,
        *,
        prefetch: int,
        max_bytes: int,
        dead: tuple[str, str],
        consume: dict[str, Any],
    ) -> None:
        self.channel = channel
        self.backlog: deque[Delivered] = deque()
        #: Why nothing more is taken, without its being an error: ``"own"``.
        self.stopped = ""
        self.oversized = 0
        self.open = False  # whether bundles have a queue to go to
        self._ready = ready
        self._sealer = sealer
        self._prefetch = prefetch
        self._max_bytes = max_bytes
        self._dead = dead
        self._consume = dict(consume)
        self._tag_name = self._consume.pop("consumer_tag", None) or f"broadway-{sealer.prefix}"
        self._consumer: str | None = None
        self._consumers = 0
        self._exact = False
        self._bound = 0
        self._pending: list[Held] = []
        self._pending_bytes = 0
        self._pending_tag: int | None = None
        self._timer: Any = None
        # What another connection secured and could not acknowledge any more is a repetition too.
        self._known = dict(sealer.again)
        self.lane = Lane(
            channel,
            multiple=True,
            secured=self._secured,
            failed=ready.fail,
            what=f"the lease queue of generation {sealer.generation}",
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
        stream = demand >= self._prefetch
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

    def _cancel(self) -> None:
        if self._consumer is not None and self.channel.raw.is_open:
            consumer, self._consumer = self._consumer, None
            self.channel.raw.basic_cancel(consumer)

    def _secured(self, loads: list[Any]) -> None:
        if self._exact:
            # Before the acknowledgement: it would make room for deliveries nobody asked for.
            self._cancel()
        if self._known:
            for held in (each for load in loads if load for each in load):
                if held.message_id in self._known:
                    self._sealer.again[held.message_id] = self._known[held.message_id]
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
        if self._pending:
            self._seal_in_time(now=full or bool(self.stopped))

    def _take(self, room: int) -> int:
        """Move ``room`` deliveries into bundles; how many became messages."""
        backlog, pending = self.backlog, self._pending
        sealer, prefix = self._sealer, self._sealer.prefix
        size, limit, largest = self._pending_bytes, bundles.MAX_BYTES, self._max_bytes
        taken = 0
        for _ in range(room):
            delivered = backlog[0]
            tag, redelivered, route, properties, body = delivered
            mark = mark_of(properties)
            if mark is not None and mark.giver == self._sealer.generation:
                self.stopped = "own"
                break
            backlog.popleft()
            weight = len(body) + len(properties) + len(route) + 64
            if pending and (size + weight > limit or len(pending) >= bundles.MAX_MESSAGES):
                self._seal()
                pending, size = self._pending, 0
            if len(body) > largest:
                if pending:
                    self._seal()
                    pending, size = self._pending, 0
                self._set_aside(delivered)
                continue
            if mark is None:
                sealer.number += 1
                name = f"{prefix}-{sealer.number:x}"
                held = Held(name, 1, 0, redelivered, route, properties, body)
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
        elif self._pending_tag is not None and not pending and not self._sealer.waiting:
            # Nothing but repetitions since the last bundle: done with when that is.
            tag, self._pending_tag = self._pending_tag, None
            if not self.lane.window.extend(tag) and self.channel.raw.is_open:
                self.channel.raw.basic_ack(tag, multiple=True)
        return taken

    def _marked(self, mark: Mark, delivered: Delivered) -> Held | None:
        """A message that was published again; ``None`` if this generation has it already."""
        print_ = hash((delivered.body, mark.attempt))
        message_id = mark.message_id
        if message_id in self._known:
            if self._known[message_id] == print_:
                return None
            self._sealer.number += 1
            message_id = f"{message_id}~{self._sealer.prefix}-{self._sealer.number:x}"
        self._known[message_id] = print_
        return Held(
            message_id, mark.attempt, 0, True, delivered.route, delivered.properties, delivered.body
        )

    def _set_aside(self, delivered: Delivered) -> None:
        self.oversized += 1
        self._sealer.number += 1
        key = f"{self._sealer.prefix}-{self._sealer.number:x}"
        reason = f"its body has {len(delivered.body)} bytes, more than max_message_bytes"
        exchange, routing_key = self._dead
        self.lane.publish(
            exchange,
            routing_key,
            republished(
                delivered.properties,
                Mark(key, self._sealer.generation, 1),
                extra={"x-broadway-reason": reason, "x-broadway-stage": "receive"},
            ),
            delivered.body,
            key=key,
            tag=delivered.tag,
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

    def flush(self) -> None:
        """Publish what is pending now."""
        if self.lane.failure is None and self.open:
            self._seal()
