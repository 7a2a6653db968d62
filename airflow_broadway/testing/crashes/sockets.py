"""The boundary of sockets: connects and sends of clients written in Python.

The sockets of C clients, such as psycopg, are not intercepted.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace


class Sockets:
    """Intercepts connects and sends of every socket of this process; half a send is half its bytes.

    Reads are not intercepted: dying while reading is the same as dying after the send.
    """

    def install(self, interceptor: Interceptor) -> None:
        def connecting(do: Any) -> Any:
            def connect(self: socket.socket, address: Any) -> Any:
                where = _format_address(address)
                return interceptor.call(
                    "connect",
                    where,
                    lambda: do(self, address),
                    error=_reset,
                    hangs=_timed_out(self),
                )

            return connect

        def sending(do: Any) -> Any:
            def send(self: socket.socket, data: Any, *args: Any) -> Any:
                return interceptor.call(
                    "send",
                    _peer(self),
                    lambda: do(self, data, *args),
                    half=lambda: do(self, memoryview(data).cast("B")[: len(data) // 2], *args),
                    error=_reset,
                    hangs=_timed_out(self),
                )

            return send

        replace(socket.socket, "connect", connecting)
        for owner in (socket.socket, ssl.SSLSocket):
            for name in ("send", "sendall"):
                replace(owner, name, sending)


def _peer(sock: socket.socket) -> str:
    try:
        return _format_address(sock.getpeername())
    except OSError:
        return ""


def _format_address(address: Any) -> str:
    if isinstance(address, tuple):
        return ":".join(map(str, address[:2]))
    return address.decode(errors="replace") if isinstance(address, bytes) else str(address)


def _timed_out(sock: socket.socket) -> Callable[[], Exception] | None:
    return None if sock.gettimeout() is None else lambda: TimeoutError("timed out")


def _reset() -> OSError:
    return ConnectionResetError("a fault was injected into the connection")
