"""The boundary of pika: the methods that a process sends to RabbitMQ, named by method and queue.

What comes from the broker is no point: to die when an answer has come is to die before the next
method is sent.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace

__all__ = ["Amqp"]

#: Methods after which the broker has what it had before, but for what any death ends.
_LOOKS = ("connection.", "channel.", "confirm.", "basic.qos")


class _Cut(ConnectionError):
    """The connection is cut here."""


class Amqp:
    """Every connection of pika that this process has.

    Half of a publication is the first half of its bytes.  A method that fails is not sent, for the
    connection is cut; one whose answer is lost is the last that is.

    :param plain: Takes out of a queue's name what is random in it.  The methods of several threads
        come in any order, so their names should not depend on it.
    """

    def __init__(self, plain: Callable[[str], str] = lambda queue: queue) -> None:
        self._plain = plain
        # Which queue a channel reads, by connection and number.
        self._reads: dict[tuple[int, int], str] = {}

    def install(self, interceptor: Interceptor) -> None:
        from pika.connection import Connection

        self._interceptor = interceptor
        replace(Connection, "_send_method", self._sending)

    def _sending(self, do: Any) -> Any:
        def send(connection: Any, channel: int, method: Any, content: Any = None) -> None:
            name = method.NAME.lower()

            def whole() -> None:
                do(connection, channel, method, content)
                _flush(connection)

            def half() -> None:
                data = _marshalled(connection, lambda: do(connection, channel, method, content))
                _flush(connection)
                connection._transport._sock.send(data[: len(data) // 2])

            looks = name.startswith(_LOOKS) or getattr(method, "passive", False)
            try:
                self._interceptor.call(
                    name,
                    self._target(connection, channel, method),
                    whole,
                    half=half if content else None,
                    changes=not looks,
                    error=_Cut,
                )
            except _Cut:
                sock = _socket(connection)
                if sock is not None:
                    with suppress(OSError):  # the other end was first
                        sock.shutdown(socket.SHUT_RDWR)

        return send

    def _target(self, connection: Any, channel: int, method: Any) -> str:
        queue: Any = getattr(method, "queue", None) or getattr(method, "routing_key", None)
        reads = id(connection), channel
        if method.NAME in ("Basic.Get", "Basic.Consume"):
            self._reads[reads] = queue
        elif queue is None and method.NAME.startswith("Basic."):
            queue = self._reads.get(reads)
        return self._plain(queue or getattr(method, "exchange", None) or "")


def _flush(connection: Any) -> None:
    """Give the system all that is to be sent: after the call it is on its way, whoever dies."""
    if _socket(connection) is not None and connection._transport._tx_buffers:
        connection._transport._on_socket_writable()


def _socket(connection: Any) -> socket.socket | None:
    """The connection's socket, unless it was lost just now."""
    sock: socket.socket | None = getattr(connection._transport, "_sock", None)
    return sock if sock is not None and sock.fileno() >= 0 else None


def _marshalled(connection: Any, send: Callable[[], object]) -> bytes:
    """The bytes that would be sent."""
    frames: list[bytes] = []
    connection._output_marshaled_frames = frames.extend
    try:
        send()
    finally:
        del connection._output_marshaled_frames
    return b"".join(frames)
