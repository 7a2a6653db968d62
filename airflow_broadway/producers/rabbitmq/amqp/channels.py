"""Channels that publish with publisher confirms, and a channel for ``basic.get``.

A :class:`ConfirmChannel` acknowledges deliveries after the confirms of their publications.  A
:class:`Publisher` waits for confirms.  A :class:`Getter` gets messages one at a time.

A publication is secured when the broker has confirmed it and has not returned it.  A return arrives
before the confirm and cancels it.  A nack is a refusal.  Confirms arrive in any order.

A delivery may be acknowledged when its publications, and those of all deliveries before it, are
secured.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from airflow_broadway.core import errors
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    ANSWER_TIMEOUT,
    MISSING,
    Channel,
    ConnectionThread,
    RawProperties,
    Refused,
    Reply,
)
from airflow_broadway.producers.rabbitmq.amqp.properties import message_id_of
from airflow_broadway.producers.rabbitmq.amqp.wire import Delivered

#: Acks per portion.  The broker sends a quorum queue at most 32 unapplied acks of a channel.  It
#: buffers the others, and drops them if the channel is closed first (tested with RabbitMQ 3.10.8).
ACKS_AT_ONCE = 15

#: Seconds to wait until a queue has requeued nacked messages; and between two checks.
_REQUEUE_TIMEOUT = 2.0
_CHECK_INTERVAL = 0.01


class Getter:
    """A channel that gets messages from a queue, and acknowledges or requeues them."""

    def __init__(self, connection: ConnectionThread, queue: str) -> None:
        from pika import spec

        self._channel = connection.channel()
        self._connection = connection
        self._queue = queue
        self._reply: Reply | None = None
        self._tags_to_ack: list[int] = []
        self._unacknowledged = 0
        raw, number = self._channel.raw, self._channel.number

        def attach() -> None:
            connection.raw.frames.on_get(number, self._answer)
            raw.add_callback(
                lambda frame: self._answer(None), [spec.Basic.GetEmpty], one_shot=False
            )

        connection.post(attach)

    def get(self, seconds: float = ANSWER_TIMEOUT) -> Delivered | None:
        """Returns the next message; ``None`` if none is ready.

        :raises ProducerUnavailable: If the queue does not respond within ``seconds``.
        """
        raw = self._channel.raw

        def send_get(reply: Any) -> None:
            self._channel.await_reply(reply)
            self._reply = reply
            raw.basic_get(self._queue, lambda *_: None)  # the parser handles the response

        delivered: Delivered | None = self._connection.ask(send_get, seconds)
        self._unacknowledged += delivered is not None
        return delivered

    def mark_for_ack(self, tag: int) -> None:
        """Marks a message for acknowledgement by :meth:`ack`."""
        self._tags_to_ack.append(tag)

    def ack(self) -> None:
        """Acknowledges the marked messages."""
        tags, self._tags_to_ack = self._tags_to_ack, []
        for start in range(0, len(tags), ACKS_AT_ONCE):
            if start and not self._await_acks():
                return
            self._ack(tags[start : start + ACKS_AT_ONCE])

    def _ack(self, tags: list[int]) -> None:
        raw = self._channel.raw
        self._connection.run(lambda: [raw.basic_ack(tag) for tag in tags])
        self._unacknowledged -= len(tags)

    def _await_acks(self) -> bool:
        """Waits until the queue has processed all acks; ``False`` if it was deleted."""
        try:
            self.get()  # processed in order; the message is requeued when the channel is closed
        except Refused as error:
            if error.code != MISSING:
                raise
            return False
        return True

    def close(self) -> None:
        """Closes the channel after the broker has processed all acks."""
        self._channel.flush_and_close()

    def requeue_and_close(self) -> None:
        """Requeues the unacknowledged messages at their original position, and closes the channel.

        A queue may learn of a closed channel late, and a quorum queue requeues after a disk write:
        until then its depth is too low.  So this waits until the queue counts the messages again,
        but only briefly: another client may have consumed them.
        """
        raw = self._channel.raw
        deadline = time.monotonic() + _REQUEUE_TIMEOUT

        def run() -> None:
            if raw.is_open:
                raw.basic_nack(0, multiple=True, requeue=True)

        try:
            total = self._count_ready() + self._unacknowledged if self._unacknowledged else 0
            self._connection.post(run)
            while total and self._count_ready() < total and time.monotonic() < deadline:
                time.sleep(_CHECK_INTERVAL)
        except ProducerError:  # the broker requeues them when the channel is closed
            return
        self.close()

    def _count_ready(self) -> int:
        declared = self._channel.call("queue_declare", queue=self._queue, passive=True)
        return int(declared.method.message_count)

    def _answer(self, delivered: Delivered | None) -> None:
        # Otherwise pika still waits for the response, and refuses the next basic_get.
        self._channel.raw._on_getok_callback = None
        if self._reply is not None:
            self._reply.resolve(delivered)


#: Messages, and bytes, that a publisher sends before it waits for their confirms.
_PORTION, _PORTION_BYTES = 2000, 4 * 1024 * 1024

#: Returns the key of a publication, from its properties.
KeyOf = Callable[[bytes], str | None]


@dataclass(slots=True, eq=False)
class Publication:
    """A publication, in the order of the deliveries."""

    key: str
    tag: int | None
    load: Any
    confirmed: bool = False
    refused: bool = False


class ConfirmWindow:
    """The publications of a channel that are not secured yet."""

    def __init__(self) -> None:
        #: Key → reason, of all publications that the broker returned or refused.
        self.refused: dict[str, str] = {}
        self._last = 0
        self._open: dict[int, Publication] = {}
        self._keys: dict[str, Publication] = {}
        self._order: deque[Publication] = deque()

    def __len__(self) -> int:
        """The number of unconfirmed publications."""
        return len(self._open)

    @property
    def idle(self) -> bool:
        """Whether all publications are secured."""
        return not self._order

    @property
    def uncertain(self) -> bool:
        """Whether the broker may have accepted a publication that is not secured."""
        return any(not place.refused for place in self._order)

    def publish(self, key: str, tag: int | None = None, load: Any = None) -> None:
        """Adds the publication that is sent next.

        :param key: Identifies it in a return.
        :param tag: The delivery to acknowledge when this and all earlier publications are secured.
        :param load: The value that :meth:`take_secured` returns for it.
        """
        place = Publication(key, tag, load)
        self._last += 1
        self._order.append(place)
        self._open[self._last] = place
        self._keys[key] = place

    def extend(self, tag: int) -> bool:
        """Adds ``tag`` to the latest unsecured publication; ``False`` if there is none."""
        if not self._order:
            return False
        last = self._order[-1]
        last.tag = tag if last.tag is None else max(tag, last.tag)
        return True

    def returned(self, key: str | None, reason: str) -> None:
        """Handles a return: of one publication, or of all open ones if the key is unknown."""
        names = [key] if key is not None and key in self._keys else list(self._keys)
        for name in names:
            self.refused.setdefault(name, reason)
            self._keys[name].refused = True

    def confirmed(self, number: int, multiple: bool, *, refused: bool = False) -> list[Publication]:
        """Handles a confirm or nack; returns the publications that it covers.

        :param number: The publication's sequence number on its channel, from 1.
        """
        if multiple:
            numbers = []
            for open_number in self._open:
                if open_number > number:
                    break
                numbers.append(open_number)
        else:
            numbers = [number] if number in self._open else []
        answered = []
        for open_number in numbers:
            place = self._open.pop(open_number)
            answered.append(place)
            if self._keys.get(place.key) is place:
                del self._keys[place.key]
            if refused:
                self.refused.setdefault(place.key, "the queue refused it")
                place.refused = True
            elif place.key not in self.refused:
                place.confirmed = True
        return answered

    def take_secured(self) -> list[tuple[int | None, Any]]:
        """Returns tags and loads of newly secured publications, in order; each only once."""
        order, secured = self._order, []
        while order and order[0].confirmed:
            place = order.popleft()
            secured.append((place.tag, place.load))
        return secured

    def forget(self) -> dict[str, str]:
        """Clears the window when nothing is unconfirmed; returns the refused: key → reason."""
        refused, self.refused = self.refused, {}
        self._order.clear()
        return refused


class _ConfirmedChannel(ABC):
    """A channel whose publications are mandatory and confirmed.

    :param key_of: See :data:`KeyOf`.
    """

    def __init__(self, channel: Channel, key_of: KeyOf) -> None:
        self.channel = channel
        self.window = ConfirmWindow()
        self._key_of = key_of
        connection, number = channel.connection, channel.number
        connection.post(lambda: connection.raw.frames.on_return(number, self._returned))
        channel.call("confirm_delivery", ack_nack_callback=self._answered)

    def _send(self, exchange: str, key: str, properties: bytes, body: bytes) -> None:
        self.channel.raw.basic_publish(
            exchange, key, body, RawProperties(properties), mandatory=True
        )

    def _returned(self, code: int, text: str, properties: bytes) -> None:
        self.window.returned(self._key_of(properties), f"{text} ({code})")

    def _answered(self, frame: Any) -> None:
        method = frame.method
        refused = method.NAME == "Basic.Nack"
        self.window.confirmed(method.delivery_tag, method.multiple, refused=refused)
        self._confirmed()

    @abstractmethod
    def _confirmed(self) -> None:
        """Handles a change of the window."""


class ConfirmChannel(_ConfirmedChannel):
    """Republishes deliveries, and acknowledges them after the publisher confirms.

    All methods but the constructor run in the connection's thread.

    :param before_ack: Called before deliveries are acknowledged.
    :param secured: Called with the loads of newly secured publications, once the broker has
        processed the acks of their deliveries: only before that can it requeue one of them.
    :param failed: Called once, with the error after which nothing more is published.
    :param destination: A description of the bundles' destination, for errors.
    :param key_of: See :data:`KeyOf`; by default the property ``message_id``.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        before_ack: Callable[[], None],
        secured: Callable[[list[Any]], None],
        failed: Callable[[errors.BroadwayError], None],
        destination: str,
        key_of: KeyOf = message_id_of,
    ) -> None:
        self.failure: errors.BroadwayError | None = None
        self._before_ack = before_ack
        self._secured = secured
        #: The loads of secured publications whose acks may not have been processed.
        self._acking: deque[list[Any]] = deque()
        self._failed = failed
        self._destination = destination
        self._elsewhere: dict[str, str] = {}
        channel.on_lost(self.fail)
        super().__init__(channel, key_of)

    @property
    def is_open(self) -> bool:
        """Whether deliveries may be acknowledged."""
        return self.failure is None and bool(self.channel.raw.is_open)

    @property
    def idle(self) -> bool:
        """Whether all publications are secured, and all acks processed."""
        return self.window.idle and not self._acking

    @property
    def uncertain(self) -> bool:
        """Whether the broker may have accepted a publication whose load was not returned."""
        return self.window.uncertain or bool(self._acking)

    def publish(
        self,
        exchange: str,
        routing_key: str,
        properties: bytes,
        body: bytes,
        *,
        key: str,
        tag: int | None = None,
        load: Any = None,
        elsewhere: bool = False,
    ) -> None:
        """Publishes a message that replaces deliveries.

        ``secured`` gets ``load``, and ``tag`` is acknowledged, when this publication and all
        earlier ones are secured.

        :param elsewhere: Whether the destination is not a holding queue, for errors.
        """
        if self.failure is not None:
            return
        if elsewhere:
            self._elsewhere[key] = routing_key or exchange
        self.window.publish(key, tag, load)
        self._send(exchange, routing_key, properties, body)

    def requeue(self, tags: Iterable[int]) -> None:
        """Requeues deliveries."""
        if self.is_open:
            for tag in tags:
                self.channel.raw.basic_nack(tag, requeue=True)

    def done(self, tag: int) -> None:
        """Acknowledges ``tag`` when all earlier publications are secured."""
        if not self.window.extend(tag) and self.is_open:
            self.channel.raw.basic_ack(tag, multiple=True)

    def end(self) -> None:
        """Ends all publishing and closes the channel: unacknowledged deliveries are requeued."""
        if self.failure is None:
            self.failure = errors.ProducerUnavailable("the source has stopped")
        if self.channel.raw.is_open:
            self.channel.raw.close()

    def fail(self, error: errors.BroadwayError) -> None:
        """Stops publishing and acknowledging; the first error is kept."""
        if self.failure is None:
            self.failure = error
            self._failed(error)

    def _confirmed(self) -> None:
        if self.is_open and (secured := self.window.take_secured()):
            self._before_ack()
            tags = [tag for tag, _ in secured if tag is not None]
            if tags:
                self.channel.raw.basic_ack(tags[-1], multiple=True)
            self._acking.append([load for _, load in secured])
            # Any request does whose reply follows the ack; each consumer sets its own prefetch.
            self.channel.raw.basic_qos(prefetch_count=1, callback=self._acked)
        if self.window.refused:
            self.fail(self._refusal(*next(iter(self.window.refused.items()))))

    def _acked(self, _: Any) -> None:
        if self.channel.raw.is_open:
            self._secured(self._acking.popleft())

    def _refusal(self, key: str, reason: str) -> errors.BroadwayError:
        other = self._elsewhere.get(key)
        if other is not None:
            return errors.ProducerError(
                f"{other!r} accepts no dead letter of this run: {reason}.  Make room, or create"
                " it; unsecured messages stay in their queue"
            )
        return errors.LeaseLapsed(
            f"{self._destination} accepts no more messages: {reason}.  This run's lease was ended,"
            " or its queue deleted or filled up; unsecured messages stay in their queue"
        )


class Publisher(_ConfirmedChannel):
    """A channel that only publishes; every message is mandatory and confirmed.

    Messages are published in portions, each after the confirms of the previous one.

    :param key_of: See :data:`KeyOf`; by default the property ``message_id``.
    """

    def __init__(self, connection: ConnectionThread, key_of: KeyOf = message_id_of) -> None:
        self._reply = Reply()
        self._items: list[tuple[str, str, bytes, bytes, str]] = []
        self._bytes = 0
        self._refused: dict[str, str] = {}
        super().__init__(connection.channel(), key_of)

    def publish(
        self, exchange: str, routing_key: str, properties: bytes, body: bytes, *, key: str
    ) -> None:
        """Buffers a message; a full buffer is published.

        :param key: Identifies the message in the result of :meth:`flush`.
        """
        self._items.append((exchange, routing_key, properties, body, key))
        self._bytes += len(body)
        if len(self._items) >= _PORTION or self._bytes >= _PORTION_BYTES:
            self._send_all()

    def flush(self) -> dict[str, str]:
        """Publishes the buffer and waits for all confirms; returns the refused: key → reason.

        :raises ProducerError: If the channel is lost.
        """
        self._send_all()
        refused, self._refused = self._refused, {}
        return refused

    def close(self) -> None:
        """Closes the channel."""
        self.channel.close()

    def _send_all(self) -> None:
        items, self._items, self._bytes = self._items, [], 0
        if not items:
            return

        def run(reply: Reply) -> None:
            self.channel.await_reply(reply)
            self._reply = reply
            for exchange, routing_key, properties, body, key in items:
                self.window.publish(key)
                self._send(exchange, routing_key, properties, body)

        self.channel.connection.ask(run)
        self._refused |= self.window.forget()

    def _confirmed(self) -> None:
        if not len(self.window):
            self._reply.resolve()
