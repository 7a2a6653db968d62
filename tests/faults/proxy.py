"""A TCP proxy that injects network faults between clients and a server."""

from __future__ import annotations

import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Self


class Relay(ABC):
    """Accepts connections and opens one to the target for each.

    :param target: Host and port of the server.
    :param host: The address to listen on.
    :param port: The port to listen on; 0: any free port.
    """

    def __init__(self, target: tuple[str, int], *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._target = target
        self._server = socket.create_server((host, port))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops accepting connections; existing connections stay open."""
        try:
            self._server.shutdown(socket.SHUT_RDWR)  # interrupts accept
        except OSError:  # already closed
            return
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                broker = socket.create_connection(self._target)
            except OSError:
                return
            self._relay(client, broker)

    @abstractmethod
    def _relay(self, client: socket.socket, broker: socket.socket) -> None:
        """Starts to forward bytes in both directions."""


class Proxy(Relay):
    """Cuts, stalls, delays and half-closes connections.

    :param latency: One-way delay in seconds.
    """

    def __init__(self, target: tuple[str, int], *, latency: float = 0.0, **address: Any) -> None:
        self.latency = latency
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._gate = threading.Event()
        self._gate.set()
        super().__init__(target, **address)

    def __exit__(self, *_: object) -> None:
        self.close()
        self.cut()

    def cut(self) -> None:
        """Closes every connection."""
        self._gate.set()
        for pair in list(self._pairs):
            for connection in pair:
                _shut_down(connection)
        self._pairs.clear()

    def stall(self) -> None:
        """Stops forwarding; connections stay open."""
        self._gate.clear()

    def resume(self) -> None:
        """Resumes forwarding."""
        self._gate.set()

    def half_close(self) -> None:
        """Half-closes every connection to the server: clients can receive, but not send."""
        for _, broker in list(self._pairs):
            try:
                broker.shutdown(socket.SHUT_WR)
            except OSError:
                continue

    def _relay(self, client: socket.socket, broker: socket.socket) -> None:
        self._pairs.append((client, broker))
        for connection in (client, broker):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        forwarders = []
        for source, target in ((client, broker), (broker, client)):
            buffer: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=self._receive, args=(source, buffer), daemon=True).start()
            forwarders.append(threading.Thread(target=self._forward, args=(buffer, source, target)))
        threading.Thread(
            target=self._close_when_done, args=((client, broker), forwarders), daemon=True
        ).start()

    def _close_when_done(
        self, pair: tuple[socket.socket, socket.socket], forwarders: list[threading.Thread]
    ) -> None:
        """Closes a connection after both directions have ended."""
        for buffer in forwarders:
            buffer.daemon = True
            buffer.start()
        for buffer in forwarders:
            buffer.join()
        for connection in pair:
            connection.close()
        with suppress(ValueError):  # removed by cut()
            self._pairs.remove(pair)

    def _receive(
        self, source: socket.socket, buffer: queue.SimpleQueue[tuple[float, bytes]]
    ) -> None:
        data = b"."
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            buffer.put((time.monotonic() + self.latency, data))

    def _forward(
        self,
        buffer: queue.SimpleQueue[tuple[float, bytes]],
        source: socket.socket,
        target: socket.socket,
    ) -> None:
        try:
            while True:
                due, data = buffer.get()
                time.sleep(max(0.0, due - time.monotonic()))
                self._gate.wait()
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
        except OSError:
            _shut_down(source)
            _shut_down(target)


def _shut_down(connection: socket.socket) -> None:
    """Shuts a connection down and closes it, so that the peer notices immediately.

    While another thread reads from a socket, ``close`` alone sends no FIN.  The broker would then
    keep the client's unacknowledged messages until a heartbeat is missed.
    """
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # already disconnected or closed
        pass
    connection.close()
