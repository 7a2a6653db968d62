"""Channels: two publish with confirms, one gets messages one at a time and holds them.

A :class:`ConfirmChannel` acknowledges deliveries by the confirms, a :class:`Publisher` waits for
them.

A publication may be relied on when the broker has confirmed it and has not returned it.  A return
comes before the confirm and cancels it; a nack is a refusal; confirms come in any order.

A delivery may be acknowledged when all that was made of it, and of the deliveries before it, may be
relied on.
"""

from __future__ import annotations

import time
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

#: Acknowledgements at a time.  A quorum queue is sent the first 32 of a channel that it has not yet
#: carried out; the others the broker keeps back, and forgets if the channel is closed before they
#: are due (probed with RabbitMQ 3.10.8).
ACKS_AT_ONCE = 15

#: Seconds for which a queue may take to put back what it was told to; and between two looks.
_BACK_WITHIN = 2.0
_LOOK_INTERVAL = 0.01


class Getter:
    """A channel that gets messages from a queue."""

    def __init__(self, connection: ConnectionThread, queue: str) -> None:
        from pika import spec

        self._channel = connection.channel()
        self._connection = connection
        self._queue = queue
        self._reply: Reply | None = None
        self._kept: list[int] = []
        self._held = 0
        raw, number = self._channel.raw, self._channel.number

        def attach() -> None:
            connection.raw.frames.on_get(number, self._answer)
            raw.add_callback(
                lambda frame: self._answer(None), [spec.Basic.GetEmpty], one_shot=False
            )

        connection.post(attach)

    def get(self, seconds: float = ANSWER_TIMEOUT) -> Delivered | None:
        """Returns the next message; ``None`` if none is ready.

        :raises ProducerUnavailable: If the queue does not answer within ``seconds``.
        """
        raw = self._channel.raw

        def ask(reply: Any) -> None:
            self._channel.await_reply(reply)
            self._reply = reply
            raw.basic_get(self._queue, lambda *_: None)  # what comes is read before pika sees it

        got: Delivered | None = self._connection.ask(ask, seconds)
        self._held += got is not None
        return got

    def keep(self, tag: int) -> None:
        """Note a message that :meth:`ack` is to acknowledge."""
        self._kept.append(tag)

    def ack(self) -> None:
        """Acknowledge what was kept, and no other."""
        kept, self._kept = self._kept, []
        for start in range(0, len(kept), ACKS_AT_ONCE):
            if start and not self._caught_up():
                return
            self._ack(kept[start : start + ACKS_AT_ONCE])

    def _ack(self, tags: list[int]) -> None:
        raw = self._channel.raw
        self._connection.run(lambda: [raw.basic_ack(tag) for tag in tags])
        self._held -= len(tags)

    def _caught_up(self) -> bool:
        """Wait until the queue has done what it was told; ``False`` if it is no more."""
        try:
            self.get()  # in its turn; what comes goes back when the channel is closed
        except Refused as error:
            if error.code != MISSING:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the channel, and wait for it: what was acknowledged is."""
        self._channel.flush_and_close()

    def give_back(self) -> None:
        """Put what was got and not acknowledged into its place, and close the channel.

        A queue may notice only later that a channel has closed, and a quorum queue puts back only
        when that is on its disks: whoever looks before finds less.  So this waits until the queue
        counts them again, though not for long: somebody else may have got them.
        """
        raw = self._channel.raw
        give_up_at = time.monotonic() + _BACK_WITHIN

        def run() -> None:
            if raw.is_open:
                raw.basic_nack(0, multiple=True, requeue=True)

        try:
            whole = self._ready() + self._held if self._held else 0
            self._connection.post(run)
            while whole and self._ready() < whole and time.monotonic() < give_up_at:
                time.sleep(_LOOK_INTERVAL)
        except ProducerError:  # it goes back with its channel
            return
        self.close()

    def _ready(self) -> int:
        declared = self._channel.call("queue_declare", queue=self._queue, passive=True)
        return int(declared.method.message_count)

    def _answer(self, delivered: Delivered | None) -> None:
        # pika keeps waiting for the message itself unless it is told.
        self._channel.raw._on_getok_callback = None
        if self._reply is not None:
            self._reply.give(delivered)


#: Messages, and bytes of them, that a publisher hands over before it waits for their confirms.
_PORTION, _PORTION_BYTES = 2000, 4 * 1024 * 1024

#: Names a publication by its properties, as the key under which it was published.
KeyOf = Callable[[bytes], str | None]


@dataclass(slots=True, eq=False)
class Place:
    """The place of one publication in the order of the deliveries."""

    key: str
    tag: int | None
    load: Any
    confirmed: bool = False
    refused: bool = False


class ConfirmWindow:
    """What was published on one channel and is not yet relied on."""

    def __init__(self) -> None:
        #: Key → why, of all that the broker returned or refused.
        self.refused: dict[str, str] = {}
        self._last = 0
        self._open: dict[int, Place] = {}
        self._keys: dict[str, Place] = {}
        self._order: deque[Place] = deque()

    def __len__(self) -> int:
        """Publications whose confirm is to come."""
        return len(self._open)

    @property
    def idle(self) -> bool:
        """Whether all there was may be relied on."""
        return not self._order

    @property
    def uncertain(self) -> bool:
        """Whether the broker may have taken something that is not relied on."""
        return any(not place.refused for place in self._order)

    def publish(self, key: str, tag: int | None = None, load: Any = None) -> None:
        """Note a publication, which is made next.

        :param key: Names it in a return.
        :param tag: The delivery that is done with once all up to here is relied on.
        :param load: What :meth:`relied_on` is to give back.
        """
        place = Place(key, tag, load)
        self._last += 1
        self._order.append(place)
        self._open[self._last] = place
        self._keys[key] = place

    def extend(self, tag: int) -> bool:
        """Let ``tag`` be done with when the last place is; ``False`` if there is none."""
        if not self._order:
            return False
        last = self._order[-1]
        last.tag = tag if last.tag is None else max(tag, last.tag)
        return True

    def returned(self, key: str | None, reason: str) -> None:
        """Note that the broker gave a publication back: every open one, if its key is unknown."""
        names = [key] if key is not None and key in self._keys else list(self._keys)
        for name in names:
            self.refused.setdefault(name, reason)
            self._keys[name].refused = True

    def confirmed(self, number: int, multiple: bool, *, refused: bool = False) -> list[Place]:
        """Note the answer to one publication, or to all up to it; returns their places.

        :param number: Of the publication on its channel, from 1.
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

    def relied_on(self) -> list[tuple[int | None, Any]]:
        """The tags and loads of what may newly be relied on, in order; each is returned once."""
        order, found = self._order, []
        while order and order[0].confirmed:
            place = order.popleft()
            found.append((place.tag, place.load))
        return found

    def forget(self) -> dict[str, str]:
        """Begin anew, once nothing is open; returns what was refused: key → why."""
        refused, self.refused = self.refused, {}
        self._order.clear()
        return refused


class _ConfirmedChannel:
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

    def _confirmed(self) -> None:
        """Called when the window has changed."""
        raise NotImplementedError


class ConfirmChannel(_ConfirmedChannel):
    """Publishes what is made of deliveries, and acknowledges these once that is confirmed.

    All but the constructor is for the connection's thread.

    :param secured: Called with the loads of what has just become certain, before their deliveries
        are acknowledged.
    :param failed: Called once, when nothing more may be taken.
    :param what: What bundles are published to, for errors.
    :param key_of: See :data:`KeyOf`; by default the property ``message_id``.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        secured: Callable[[list[Any]], None],
        failed: Callable[[errors.BroadwayError], None],
        what: str,
        key_of: KeyOf = message_id_of,
    ) -> None:
        self.failure: errors.BroadwayError | None = None
        self._secured = secured
        self._failed = failed
        self._what = what
        self._elsewhere: dict[str, str] = {}
        channel.on_lost(self.fail)
        super().__init__(channel, key_of)

    @property
    def is_open(self) -> bool:
        """Whether deliveries may be acknowledged."""
        return self.failure is None and bool(self.channel.raw.is_open)

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
        """Publish what was made of deliveries.

        ``tag`` is acknowledged, and ``load`` handed over, when this and all before is confirmed.

        :param elsewhere: Whether the queue is no holding queue, for errors.
        """
        if self.failure is not None:
            return
        if elsewhere:
            self._elsewhere[key] = routing_key or exchange
        self.window.publish(key, tag, load)
        self._send(exchange, routing_key, properties, body)

    def requeue(self, tags: Iterable[int]) -> None:
        """Lets the broker deliver these again."""
        if self.is_open:
            for tag in tags:
                self.channel.raw.basic_nack(tag, requeue=True)

    def done(self, tag: int) -> None:
        """Acknowledges ``tag`` when all that was published so far is confirmed."""
        if not self.window.extend(tag) and self.is_open:
            self.channel.raw.basic_ack(tag, multiple=True)

    def end(self) -> None:
        """Take, publish and acknowledge nothing more; what is not acknowledged goes back."""
        if self.failure is None:
            self.failure = errors.ProducerUnavailable("the source has stopped")
        if self.channel.raw.is_open:
            self.channel.raw.close()

    def fail(self, error: errors.BroadwayError) -> None:
        """Take nothing more."""
        if self.failure is None:
            self.failure = error
            self._failed(error)

    def _confirmed(self) -> None:
        if self.is_open and (certain := self.window.relied_on()):
            self._secured([load for _, load in certain])
            tags = [tag for tag, _ in certain if tag is not None]
            if tags:
                self.channel.raw.basic_ack(tags[-1], multiple=True)
        if self.window.refused:
            self.fail(self._refusal(*next(iter(self.window.refused.items()))))

    def _refusal(self, key: str, reason: str) -> errors.BroadwayError:
        other = self._elsewhere.get(key)
        if other is not None:
            return errors.ProducerError(
                f"{other!r} takes no message that this run would set aside there: {reason}.  Make"
                " room, or create it; what is not secured stays in its queue"
            )
        return errors.LeaseLapsed(
            f"{self._what} takes no more messages: {reason}.  This run's lease was ended,"
            " or its queue deleted or filled up; what is not secured stays in its queue"
        )


class Publisher(_ConfirmedChannel):
    """A channel for publishing alone; every message is mandatory and confirmed.

    Messages are published in portions, each after the one before is confirmed.

    :param key_of: Names a publication by its properties; by default the property ``message_id``.
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
        """Publishes, soon.

        :param key: Names it in what :meth:`flush` returns.
        """
        self._items.append((exchange, routing_key, properties, body, key))
        self._bytes += len(body)
        if len(self._items) >= _PORTION or self._bytes >= _PORTION_BYTES:
            self._send_all()

    def flush(self) -> dict[str, str]:
        """Waits until everything is confirmed; returns what was refused meanwhile: key → why.

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
            self._reply.give()
