"""The bundle that is being filled."""

from __future__ import annotations

from typing import Any

from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.confirms import ConfirmChannel
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.receive.intake import Intake

#: Seconds from a bundle's first message until it is published unfilled.
LINGER_SECONDS = 0.02


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
