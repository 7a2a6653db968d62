"""The boundary of sockets: what clients written in Python connect to, and send.

A client written in C, such as psycopg, has sockets of its own, which nobody here sees.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace


class Sockets:
    """Every socket of this process: connecting, and each sending; half of it is half of the bytes.

    Answers are no calls of their own: who dies while it reads one has sent, and no more.
    """

    def install(self, interceptor: Interceptor) -> None:
        def connecting(do: Any) -> Any:
            def connect(self: socket.socket, address: Any) -> Any:
                where = _shown(address)
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


def _peer(one: socket.socket) -> str:
    try:
        return _shown(one.getpeername())
    except OSError:
        return ""


def _shown(address: Any) -> str:
    if isinstance(address, tuple):
        return ":".join(map(str, address[:2]))
    return address.decode(errors="replace") if isinstance(address, bytes) else str(address)


def _timed_out(one: socket.socket) -> Callable[[], Exception] | None:
    return None if one.gettimeout() is None else lambda: TimeoutError("timed out")


def _reset() -> OSError:
    return ConnectionResetError("the connection was struck")
