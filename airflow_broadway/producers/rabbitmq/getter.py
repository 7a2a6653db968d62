"""Reads bundles one at a time, and holds them unacknowledged until told."""

from __future__ import annotations

from typing import Any

from airflow_broadway.producers.rabbitmq.link import ANSWER, Link

__all__ = ["Getter"]


class Getter:
    """A channel that gets messages from a queue."""

    def __init__(self, link: Link, queue: str) -> None:
        from pika import spec

        self._channel = link.channel()
        self._link = link
        self._queue = queue
        self._reply: Any = None
        self._kept: list[int] = []
        raw = self._channel.raw
        link.post(lambda: raw.add_callback(self._empty, [spec.Basic.GetEmpty], one_shot=False))

    def get(self, seconds: float = ANSWER) -> tuple[int, bytes] | None:
        """Delivery tag and body of the next message; ``None`` if none is ready.

        :raises ProducerUnavailable: If the queue does not answer within ``seconds``.
        """
        raw = self._channel.raw

        def ask(reply: Any) -> None:
            self._channel.await_reply(reply)
            self._reply = reply
            raw.basic_get(
                self._queue,
                lambda _, method, properties, body: reply.give((method.delivery_tag, body)),
            )

        got: tuple[int, bytes] | None = self._link.ask(ask, seconds)
        return got

    def keep(self, tag: int) -> None:
        """Note a message that :meth:`ack` is to acknowledge."""
        self._kept.append(tag)

    def ack(self) -> None:
        """Acknowledge what was kept, and no other."""
        kept, self._kept = self._kept, []
        raw = self._channel.raw

        def run(reply: Any) -> None:
            for tag in kept:
                raw.basic_ack(tag)
            reply.give()

        if kept:
            self._link.ask(run)

    def close(self) -> None:
        """Close the channel, and wait for it: what was acknowledged is."""
        self._channel.shut()

    def _empty(self, frame: Any) -> None:
        # pika keeps waiting for the message itself unless it is told.
        self._channel.raw._on_getok_callback = None
        if self._reply is not None:
            self._reply.give(None)
