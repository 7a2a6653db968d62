"""The boundary of pika: the AMQP methods that a process sends, named by method and queue.

Received frames are not points: a death after a response is the same as a death before the next
method.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace

#: Methods that do not change the broker's state, except for state that ends with the connection.
_READ_ONLY = ("connection.", "channel.", "confirm.", "basic.qos")
#: Seconds for the broker to receive delayed frames.
_TIMEOUT = 5.0


class _ConnectionCut(ConnectionError):
    """The connection is cut at this method."""


class _ConnectionSilent(ConnectionError):
    """The network drops all packets of the connection."""


class _Transit:
    """The frames of a connection that are still in transit."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection  # keeps its id() unique
        self.in_transit: list[bytes] = []
        sock = _socket(connection)
        self._socket = None if sock is None else socket.socket(fileno=os.dup(sock.fileno()))

    def deliver(self) -> None:
        """Delivers the frames and cuts the connection, as its client is dead."""
        if self._socket is None:
            return
        with closing(self._socket) as transit:
            transit.setblocking(True)
            transit.settimeout(_TIMEOUT)
            transit.sendall(b"".join(self.in_transit))
            transit.shutdown(socket.SHUT_WR)
            while transit.recv(65536):
                pass

    def time_out(self) -> None:
        """Closes the connection as pika does after missed heartbeats."""
        from pika.exceptions import AMQPHeartbeatTimeout

        connection = self.connection
        sock = _socket(connection)
        if sock is None:
            return
        # pika shuts its socket down; replace it, so that the duplicate can still deliver frames.
        connection._transport._nbio.remove_reader(sock.fileno())
        connection._transport._nbio.remove_writer(sock.fileno())
        one, other = socket.socketpair()
        with one, other:
            os.dup2(one.fileno(), sock.fileno())
        connection._terminate_stream(AMQPHeartbeatTimeout("an injected fault: no heartbeat"))


class Amqp:
    """Intercepts every pika connection of this process.

    Half of a publish is the first half of its bytes.  A failed method is not sent, because the
    connection is cut.  A method whose response is lost is the last one sent.  A method that times
    out, and all later ones, are delivered after the process has continued with another connection.

    :param normalize: Removes the random parts of a queue's name.  It must not depend on the order
        of calls, because threads send methods concurrently.
    """

    def __init__(self, normalize: Callable[[str], str] = lambda queue: queue) -> None:
        self._plain = normalize
        # The queue that a channel consumes, by connection and channel number.
        self._consumed_queues: dict[tuple[int, int], str] = {}
        # The queue that a connection has declared passively, until it sends another method.
        self._declared_queue: dict[int, str] = {}
        # Silent connections by id().
        self._silent: dict[int, _Transit] = {}

    def install(self, interceptor: Interceptor) -> None:
        from pika.connection import Connection

        self._interceptor = interceptor
        replace(Connection, "_send_method", self._sending)

    def _sending(self, do: Any) -> Any:
        def send(connection: Any, channel: int, method: Any, content: Any = None) -> None:
            def marshal() -> bytes:
                return _marshal(connection, lambda: do(connection, channel, method, content))

            name = method.NAME.lower()
            transit = self._silent.get(id(connection))
            if transit is not None:
                transit.in_transit.append(marshal())
                return None

            def hang() -> Exception:
                _flush(connection)
                result = self._silent[id(connection)] = _Transit(connection)
                result.in_transit.append(marshal())
                self._interceptor.apply_later(result.deliver)
                connection.ioloop.add_callback_threadsafe(result.time_out)
                return _ConnectionSilent()

            def send_all() -> None:
                do(connection, channel, method, content)
                _flush(connection)

            def send_half() -> None:
                data = marshal()
                _flush(connection)
                connection._transport._sock.send(data[: len(data) // 2])

            if self._is_repeated_count(connection, method):
                return send_all()
            read_only = name.startswith(_READ_ONLY) or getattr(method, "passive", False)
            try:
                self._interceptor.call(
                    name,
                    self._target(connection, channel, method),
                    send_all,
                    half=send_half if content else None,
                    changes=not read_only,
                    error=_ConnectionCut,
                    timeout=hang,
                )
            except _ConnectionSilent:
                pass
            except _ConnectionCut:
                sock = _socket(connection)
                if sock is not None:
                    with suppress(OSError):  # already disconnected
                        sock.shutdown(socket.SHUT_RDWR)

        return send

    def _is_repeated_count(self, connection: Any, method: Any) -> bool:
        """Returns whether a queue is counted again with no other method in between.

        Repeated counts are one point, because their number depends on the broker's timing.
        """
        name, key = method.NAME, id(connection)
        if name == "Queue.Declare" and method.passive:
            before, self._declared_queue[key] = self._declared_queue.get(key), method.queue
            return bool(before == method.queue)
        if not name.startswith("Channel."):
            self._declared_queue.pop(key, None)
        return False

    def _target(self, connection: Any, channel: int, method: Any) -> str:
        queue: Any = getattr(method, "queue", None) or getattr(method, "routing_key", None)
        channel_key = id(connection), channel
        if method.NAME in ("Basic.Get", "Basic.Consume"):
            self._consumed_queues[channel_key] = queue
        elif queue is None and method.NAME.startswith("Basic."):
            queue = self._consumed_queues.get(channel_key)
        return self._plain(queue or getattr(method, "exchange", None) or "")


def _flush(connection: Any) -> None:
    """Writes all pending bytes to the socket, so that they are sent even if the process dies."""
    if _socket(connection) is not None and connection._transport._tx_buffers:
        connection._transport._on_socket_writable()


def _socket(connection: Any) -> socket.socket | None:
    """Returns the connection's socket; ``None`` if it is closed."""
    sock: socket.socket | None = getattr(connection._transport, "_sock", None)
    return sock if sock is not None and sock.fileno() >= 0 else None


def _marshal(connection: Any, send: Callable[[], object]) -> bytes:
    """Returns the bytes that ``send`` would send."""
    frames: list[bytes] = []
    connection._output_marshaled_frames = frames.extend
    try:
        send()
    finally:
        del connection._output_marshaled_frames
    return b"".join(frames)
