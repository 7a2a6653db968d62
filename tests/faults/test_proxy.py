"""The proxy's effects on connections, seen from the broker and from the client."""

from __future__ import annotations

import socket

from tests.faults.proxy import Proxy
from tests.waiting import eventually


def test_a_cut_closes_both_ends_of_an_idle_connection():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Proxy(listener.getsockname()) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        broker, _ = listener.accept()
        with broker:
            client.settimeout(10)
            broker.settimeout(10)
            client.sendall(b"hello")
            assert broker.recv(5) == b"hello"

            proxy.cut()

            assert broker.recv(1) == b""
            assert client.recv(1) == b""


def test_a_connection_that_has_ended_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(listener.getsockname()) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            broker, _ = listener.accept()
            with broker:
                eventually(lambda: len(proxy._pairs) == 1)
                client.shutdown(socket.SHUT_WR)
                assert broker.recv(1) == b""
        eventually(lambda: not proxy._pairs)
