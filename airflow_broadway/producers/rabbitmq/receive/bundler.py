"""Makes bundles of one generation's messages, and publishes them to its holding queue."""

from __future__ import annotations

import sys
from typing import Any

from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from airflow_broadway.producers.rabbitmq.broker.names import EXCHANGE
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.receive.lease import OpenLease

#: Seconds from a bundle's first message until it is published unfilled.
LINGER_SECONDS = 0.02


class Bundler:
    """Makes the bundles of one generation, on whatever connection there is.

    :param prefix: The bundles' names begin so; unique.
    :param key: The generation's routing key.
    """

    def __init__(self, lease: OpenLease, prefix: str, key: str) -> None:
        #: Bytes of messages in a bundle: no more than the broker takes.
        self.capacity = bundles.MAX_BYTES
        #: Bytes of a message alone, once the broker has refused a larger bundle.
        self.largest = sys.maxsize
        self._lease = lease
        self._prefix = prefix
        self._key = key
        self._count = 0

    def fit(self, limit: int, *, refused: bool) -> bool:
        """Make bundles for a broker that takes no message of more than ``limit`` bytes.

        :param refused: Whether it has just refused one; else it did so to an earlier run.
        :return: Whether that changes anything.
        """
        room = limit - len(bundles.pack(self._lease.header("x" * 48, bundles.MAX_MESSAGES), []))
        if room <= 0:
            return False
        before = self.capacity, self.largest
        self.capacity = min(bundles.MAX_BYTES, room)
        if refused:
            self.largest = room
        return before != (self.capacity, self.largest)

    def publish(self, channel: ConfirmChannel, messages: list[Held], tag: int | None) -> None:
        """Secure ``messages``; then ``tag`` may be acknowledged.  For the connection's thread."""
        self._count += 1
        name = f"{self._prefix}.{self._count:x}"
        body = bundles.pack(self._lease.header(name, len(messages)), messages)
        properties = encode(
            {
                "content_type": "application/x-broadway-bundle",
                "delivery_mode": 2,
                "message_id": name,
            }
        )
        channel.publish(EXCHANGE, self._key, properties, body, key=name, tag=tag, load=messages)


class OpenBundle:
    """The bundle that is being filled on a channel; for the connection's thread."""

    def __init__(self, bundler: Bundler, channel: ConfirmChannel) -> None:
        self._bundler = bundler
        self._channel = channel
        self._timer: Any = None
        #: What is in it; to be read only.
        self.messages: list[Held] = []
        self._bytes = 0
        #: The delivery up to which all is done with once this bundle is secured.
        self._tag: int | None = None

    def add(self, held: Held, weight: int, tag: int) -> None:
        """Put a message in; a full bundle is published, and another begun."""
        full = self._bytes + weight > self._bundler.capacity
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
            self._bundler.publish(self._channel, messages, tag)

    def _linger_over(self) -> None:
        self._timer = None
        if self._channel.failure is None:
            self.publish()
