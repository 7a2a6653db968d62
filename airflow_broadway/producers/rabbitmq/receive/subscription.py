"""What the broker sends of the source queue: as much as is asked for, or a stream."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered
from airflow_broadway.producers.rabbitmq.receive.intake import Intake

log = logging.getLogger(__name__)

#: Seconds without a demand after which deliveries go back that nobody has asked for: the broker
#: closes the channel of a consumer that leaves one unacknowledged for too long.
DEMAND_TIMEOUT = 10.0


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

    def want(self, demand: int, missing: Callable[[], int]) -> None:
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
        wanted = missing()
        if self._tag is not None and not stream and self._bound > max(0, wanted):
            self.cancel()
        if self._tag is None and wanted > 0:
            self._exact = not stream
            self._consume(self._prefetch if stream else wanted)

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
