"""Publishes many messages with confirms, for a thread that waits for them all at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.confirm_window import ConfirmWindow
from airflow_broadway.producers.rabbitmq.amqp.confirms import KeyOf, select_confirms
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    ANSWER_TIMEOUT,
    ConnectionThread,
    raw_properties,
)
from airflow_broadway.producers.rabbitmq.amqp.properties import message_id_of

#: Publications that may wait for their confirm, and how many are handed over at a time.
_MAX_UNCONFIRMED, _PORTION = 2000, 100
#: The same in bytes, which is what memory they take.
_MAX_UNCONFIRMED_BYTES, _PORTION_BYTES = 16 * 1024 * 1024, 1024 * 1024

_Item = tuple[str, str, bytes, bytes, str]


class Publisher:
    """A channel for publishing alone; every message is mandatory and confirmed.

    :param key_of: Names a publication by its properties; by default the property ``message_id``.
    """

    def __init__(self, connection: ConnectionThread, key_of: KeyOf = message_id_of) -> None:
        self._connection = connection
        self._channel = connection.channel()
        self._window = ConfirmWindow()
        self._changed = threading.Condition()
        self._items: list[_Item] = []
        self._bytes = 0
        self._posted = 0  # handed over and not yet in the window
        self._unconfirmed = 0  # bytes that were handed over
        self._lost: ProducerError | None = None
        self._channel.on_lost(self._on_lost)
        select_confirms(self._channel, self._confirmed, self._returned, key_of)

    def publish(
        self, exchange: str, routing_key: str, properties: bytes, body: bytes, *, key: str
    ) -> None:
        """Publish, soon.

        :param key: Names it in what :meth:`flush` returns.
        """
        self._items.append((exchange, routing_key, properties, body, key))
        self._bytes += len(body)
        if len(self._items) >= _PORTION or self._bytes >= _PORTION_BYTES:
            self._send()

    def flush(self) -> dict[str, str]:
        """Wait until everything is confirmed; returns what was refused meanwhile: key → why.

        :raises ProducerError: If the channel is lost.
        """
        self._send()
        self._wait(lambda: not self._posted and not len(self._window))
        with self._changed:
            return self._window.forget()

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()

    def _send(self) -> None:
        items, size = self._items, self._bytes
        self._items, self._bytes = [], 0
        if not items:
            return
        self._wait(
            lambda: (
                self._posted + len(self._window) < _MAX_UNCONFIRMED
                and self._unconfirmed < _MAX_UNCONFIRMED_BYTES
            )
        )
        with self._changed:
            self._posted += len(items)
            self._unconfirmed += size
        raw = self._channel.raw

        def run() -> None:
            with self._changed:
                self._posted -= len(items)
                if self._lost is None:
                    for *_, body, key in items:
                        self._window.publish(key, load=len(body))
            if self._lost is None:
                for exchange, routing_key, properties, body, _ in items:
                    raw.basic_publish(
                        exchange, routing_key, body, raw_properties(properties), mandatory=True
                    )

        self._connection.post(run)

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._changed:
            while not (done() or self._lost is not None):
                before = self._posted + len(self._window)
                if (
                    not self._changed.wait(ANSWER_TIMEOUT)
                    and before == self._posted + len(self._window)
                    and not self._connection.blocked
                ):
                    raise ProducerUnavailable(
                        f"RabbitMQ confirmed nothing that was published for {ANSWER_TIMEOUT:.0f} s"
                    )
            if self._lost is not None:
                raise self._lost

    # -- in the connection's thread ------------------------------------------------------------

    def _confirmed(self, number: int, multiple: bool, refused: bool) -> None:
        with self._changed:
            answered = self._window.confirmed(number, multiple, refused=refused)
            self._unconfirmed -= sum(place.load for place in answered)
            if not refused:
                self._window.relied_on()
            self._changed.notify()

    def _returned(self, key: str | None, code: int, text: str) -> None:
        with self._changed:
            self._window.returned(key, f"{text} ({code})")

    def _on_lost(self, error: ProducerError) -> None:
        with self._changed:
            self._lost = error
            self._changed.notify()
