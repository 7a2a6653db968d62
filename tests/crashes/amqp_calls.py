"""The boundary of pika: the methods that a process sends to RabbitMQ, named by method and queue.

What comes from the broker is no point: to die when an answer has come is to die before the next
method is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace

#: Methods after which the broker has what it had before, but for what any death ends.
_LOOKS = ("connection.", "channel.", "confirm.", "basic.qos")
#: Seconds for the broker to take what was on its way.
_PATIENCE = 5.0


class _Cut(ConnectionError):
    """The connection is cut here."""


class _Silent(ConnectionError):
    """The broker is not heard any more, and does not hear either."""


class _Line:
    """Frames that a connection has sent and that are still in transit."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection  # else another could get its place in memory
        self.on_its_way: list[bytes] = []
        sock = _socket(connection)
        self._socket = None if sock is None else socket.socket(fileno=os.dup(sock.fileno()))

    def deliver(self) -> None:
        """Lets it arrive; then the connection is cut, since its client is dead."""
        if self._socket is None:
            return
        with closing(self._socket) as line:
            line.setblocking(True)
            line.settimeout(_PATIENCE)
            line.sendall(b"".join(self.on_its_way))
            line.shutdown(socket.SHUT_WR)
            while line.recv(65536):
                pass

    def give_up(self) -> None:
        """Closes the connection as pika does after missed heartbeats."""
        from pika.exceptions import AMQPHeartbeatTimeout

        connection = self.connection
        sock = _socket(connection)
        if sock is None:
            return
        # pika shuts its socket down, which would end the line: let it be another one.
        connection._transport._nbio.remove_reader(sock.fileno())
        connection._transport._nbio.remove_writer(sock.fileno())
        one, other = socket.socketpair()
        with one, other:
            os.dup2(one.fileno(), sock.fileno())
        connection._terminate_stream(AMQPHeartbeatTimeout("no heartbeat came: struck"))


class Amqp:
    """Every connection of pika that this process has.

    Half of a publication is the first half of its bytes.  A method that fails is not sent, for the
    connection is cut; one whose answer is lost is the last that is.  One that hangs is on its way,
    with all that is sent after it, until the process has gone on with another connection.

    :param plain: Takes out of a queue's name what is random in it.  The methods of several threads
        come in any order, so their names should not depend on it.
    """

    def __init__(self, plain: Callable[[str], str] = lambda queue: queue) -> None:
        self._plain = plain
        # Which queue a channel reads, by connection and number.
        self._reads: dict[tuple[int, int], str] = {}
        # Which queue a connection has declared passively since it sent anything else.
        self._counted: dict[int, str] = {}
        # Connections that are silent, by their places in memory.
        self._silent: dict[int, _Line] = {}

    def install(self, interceptor: Interceptor) -> None:
        from pika.connection import Connection

        self._interceptor = interceptor
        replace(Connection, "_send_method", self._sending)

    def _sending(self, do: Any) -> Any:
        def send(connection: Any, channel: int, method: Any, content: Any = None) -> None:
            def sent() -> bytes:
                return _marshalled(connection, lambda: do(connection, channel, method, content))

            name = method.NAME.lower()
            line = self._silent.get(id(connection))
            if line is not None:
                line.on_its_way.append(sent())
                return None

            def hung() -> Exception:
                _flush(connection)
                result = self._silent[id(connection)] = _Line(connection)
                result.on_its_way.append(sent())
                self._interceptor.do_later(result.deliver)
                connection.ioloop.add_callback_threadsafe(result.give_up)
                return _Silent()

            def whole() -> None:
                do(connection, channel, method, content)
                _flush(connection)

            def half() -> None:
                data = sent()
                _flush(connection)
                connection._transport._sock.send(data[: len(data) // 2])

            if self._counts_again(connection, method):
                return whole()
            looks = name.startswith(_LOOKS) or getattr(method, "passive", False)
            try:
                self._interceptor.call(
                    name,
                    self._target(connection, channel, method),
                    whole,
                    half=half if content else None,
                    changes=not looks,
                    error=_Cut,
                    hangs=hung,
                )
            except _Silent:
                pass
            except _Cut:
                sock = _socket(connection)
                if sock is not None:
                    with suppress(OSError):  # the other end was first
                        sock.shutdown(socket.SHUT_RDWR)

        return send

    def _counts_again(self, connection: Any, method: Any) -> bool:
        """Whether a queue is counted again with nothing sent since: no other point.

        How often a process does so depends on how soon the broker's count is right.
        """
        name, key = method.NAME, id(connection)
        if name == "Queue.Declare" and method.passive:
            before, self._counted[key] = self._counted.get(key), method.queue
            return bool(before == method.queue)
        if not name.startswith("Channel."):
            self._counted.pop(key, None)
        return False

    def _target(self, connection: Any, channel: int, method: Any) -> str:
        queue: Any = getattr(method, "queue", None) or getattr(method, "routing_key", None)
        reads = id(connection), channel
        if method.NAME in ("Basic.Get", "Basic.Consume"):
            self._reads[reads] = queue
        elif queue is None and method.NAME.startswith("Basic."):
            queue = self._reads.get(reads)
        return self._plain(queue or getattr(method, "exchange", None) or "")


def _flush(connection: Any) -> None:
    """Hands all pending bytes to the system: they are sent even if the process dies."""
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
