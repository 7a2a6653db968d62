"""Connections that are dropped, delayed or half-closed, by a proxy before the broker."""

from __future__ import annotations

import socket
import threading
import time
from typing import Self

from tests.faults.found import Found
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_cases.registry import case
from tests.faults.rabbitmq_cases.working import ends_well, finish, found_by_workers, spawn

__all__ = ["Proxy"]


class Proxy:
    """Between a client and its broker: cuts, stalls and half-closes connections."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._gate = threading.Event()
        self._gate.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Drop every connection."""
        self._gate.set()
        for pair in self._pairs:
            for each in pair:
                each.close() if each.fileno() >= 0 else None
        self._pairs.clear()

    def stall(self) -> None:
        """Let nothing through."""
        self._gate.clear()

    def go_on(self) -> None:
        """Let everything through."""
        self._gate.set()

    def half_close(self) -> None:
        """End what the clients send, and go on with what they are sent."""
        for _, broker in list(self._pairs):
            try:
                broker.shutdown(socket.SHUT_WR)
            except OSError:
                continue

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
                broker = socket.create_connection(self._target)
            except OSError:
                return
            self._pairs.append((client, broker))
            for source, target in ((client, broker), (broker, client)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._gate.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()


def _broken(place: Place, name: str, harm: str) -> Found:
    place.fill(5_000)
    with Proxy(place.server.address) as proxy:
        worker = spawn(place, lease=40.0, most=600, uri=f"amqp://127.0.0.1:{proxy.port}")
        for pause in (0.3, 0.7, 0.5):
            time.sleep(pause)
            getattr(proxy, harm)()
            if harm == "stall":
                time.sleep(1.0)
                proxy.go_on()
        ends_well(worker)

    finish(place, lease=40.0, most=600)

    return found_by_workers(place, name, 5_000)


@case()
def the_network_drops_connections(place: Place, name: str) -> Found:
    return _broken(place, name, "cut")


@case()
def the_network_closes_one_half(place: Place, name: str) -> Found:
    return _broken(place, name, "half_close")


@case()
def the_network_stands_still(place: Place, name: str) -> Found:
    return _broken(place, name, "stall")
