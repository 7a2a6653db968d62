"""A proxy between a client and its broker, which harms what goes through it."""

from __future__ import annotations

import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Self


class Relay(ABC):
    """Accepts connections for a broker.

    :param host: The address on which clients find it.
    :param port: Where clients find it; one that is free, unless given.
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
        """Takes no connection any more; those that are there stay."""
        try:
            self._server.shutdown(socket.SHUT_RDWR)  # or accept would go on waiting
        except OSError:  # closed already
            return
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                broker = socket.create_connection(self._target)
            except OSError:
                return
            self._join(client, broker)

    @abstractmethod
    def _join(self, client: socket.socket, broker: socket.socket) -> None:
        """Lets bytes through in both directions, from now on."""


class Proxy(Relay):
    """Cuts, stalls, delays and half-closes connections.

    :param latency: Seconds for which everything is on its way, in each direction.
    """

    def __init__(self, target: tuple[str, int], *, latency: float = 0.0, **where: Any) -> None:
        self.latency = latency
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._gate = threading.Event()
        self._gate.set()
        super().__init__(target, **where)

    def __exit__(self, *_: object) -> None:
        self.close()
        self.cut()

    def cut(self) -> None:
        """Drops every connection."""
        self._gate.set()
        for pair in list(self._pairs):
            for end in pair:
                _hang_up(end)
        self._pairs.clear()

    def stall(self) -> None:
        """Lets nothing through."""
        self._gate.clear()

    def go_on(self) -> None:
        """Lets everything through."""
        self._gate.set()

    def half_close(self) -> None:
        """Ends what the clients send, not what they receive."""
        for _, broker in list(self._pairs):
            try:
                broker.shutdown(socket.SHUT_WR)
            except OSError:
                continue

    def _join(self, client: socket.socket, broker: socket.socket) -> None:
        self._pairs.append((client, broker))
        for end in (client, broker):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = []
        for source, target in ((client, broker), (broker, client)):
            way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threading.Thread(target=self._take, args=(source, way), daemon=True).start()
            ways.append(threading.Thread(target=self._give, args=(way, source, target)))
        threading.Thread(target=self._forget, args=((client, broker), ways), daemon=True).start()

    def _forget(
        self, pair: tuple[socket.socket, socket.socket], ways: list[threading.Thread]
    ) -> None:
        """Closes a connection that has ended in both directions."""
        for way in ways:
            way.daemon = True
            way.start()
        for way in ways:
            way.join()
        for end in pair:
            end.close()
        with suppress(ValueError):  # it was cut
            self._pairs.remove(pair)

    def _take(self, source: socket.socket, way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"."
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            way.put((time.monotonic() + self.latency, data))

    def _give(
        self,
        way: queue.SimpleQueue[tuple[float, bytes]],
        source: socket.socket,
        target: socket.socket,
    ) -> None:
        try:
            while True:
                due, data = way.get()
                time.sleep(max(0.0, due - time.monotonic()))
                self._gate.wait()
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
        except OSError:
            _hang_up(source)
            _hang_up(target)


def _hang_up(end: socket.socket) -> None:
    """Ends a connection so that its other side knows at once.

    Closing alone does nothing while another thread reads from it: the broker would take the client
    for alive, and keep what that one has not acknowledged, until a heartbeat.
    """
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is gone, or closed already
        pass
    end.close()
