"""The boundaries of files and folders, SQLite, and sockets of clients written in Python.

The sockets of C clients, such as psycopg, are not intercepted.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import socket
import sqlite3
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace

_CHANGES = ("INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "DROP", "ALTER", "COMMIT", "END")
_LOOKS = ("BEGIN", "SELECT", "WITH", "ROLLBACK")
_TABLE = re.compile(
    r"\b(?:INTO|UPDATE|FROM|TABLE|INDEX)\s+(?:IF NOT EXISTS\s+)?([\w.\"]+)", re.IGNORECASE
)


# -- files ---------------------------------------------------------------------------------------


class LocalFiles:
    """Intercepts file operations below one folder: create, sync, link, replace, remove, list, read.

    Half of a sync writes the first half of the file's bytes.

    :param folder: Files elsewhere do not belong to the pipeline, and are not intercepted.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.path.realpath(folder) + os.sep

    def install(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        replace(os, "open", self._os_open)
        builtins.open = io.open = self._opened(io.open)
        replace(os, "fsync", self._fsync)
        for name in ("link", "replace", "rename"):
            replace(os, name, self._of_path(name, place=1, disk_full=_no_room))
        for name in ("remove", "unlink"):
            replace(os, name, self._of_path("remove"))
        replace(os, "mkdir", self._of_path("mkdir", disk_full=_no_room))
        replace(os, "rmdir", self._of_path("rmdir"))
        for name in ("listdir", "scandir"):
            replace(os, name, self._of_path("list", changes=False))

    # -- replacements ----------------------------------------------------------------------------

    def _os_open(self, do: Any) -> Any:
        def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            name = self._name(path, kwargs.get("dir_fd")) if flags & os.O_CREAT else None
            opens = partial(do, path, flags, *args, **kwargs)
            return self._call("create", name, opens, disk_full=_no_room)

        return open_file

    def _opened(self, do: Any) -> Any:
        def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            name = None if isinstance(file, int) else self._name(file)
            opens = partial(do, file, mode, *args, **kwargs)
            if any(flag in mode for flag in "wxa+"):
                return self._call("create", name, opens, disk_full=_no_room)
            return self._call("read", name, opens, changes=False)

        return open_file

    def _fsync(self, do: Any) -> Any:
        def fsync(handle: Any) -> Any:
            number = handle if isinstance(handle, int) else handle.fileno()
            path = os.readlink(f"/proc/self/fd/{number}")
            if os.path.isdir(path):
                return self._call("sync", self._name(path), partial(do, handle), changes=False)

            def half() -> None:
                os.ftruncate(number, os.fstat(number).st_size // 2)

            return self._call(
                "write", self._name(path), partial(do, handle), half=half, disk_full=_no_room
            )

        return fsync

    def _of_path(self, kind: str, *, place: int = 0, **options: Any) -> Callable[[Any], Any]:
        """Intercepts a function by its n-th argument, a path."""

        def wrap(do: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                path = args[place] if place < len(args) else kwargs.get("path", ".")
                name = self._name(path, kwargs.get("dir_fd"))
                return self._call(kind, name, partial(do, *args, **kwargs), **options)

            return call

        return wrap

    # -- one call --------------------------------------------------------------------------------

    def _name(self, path: Any, folder: int | None = None) -> str | None:
        """Returns the path relative to the folder; ``None`` if it is outside."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        text = os.fsdecode(path)
        if folder is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
        # Not realpath, which would read each part and resolve links that are being created.
        text = os.path.abspath(text)
        return text[len(self._folder) :] if text.startswith(self._folder) else None

    def _call(self, kind: str, name: str | None, do: Callable[[], Any], **options: Any) -> Any:
        """Makes a call, which is intercepted if its file is in the folder."""
        return do() if name is None else self._interceptor.call(kind, name, do, **options)


def _no_room() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- SQLite --------------------------------------------------------------------------------------


class Sqlite:
    """Intercepts every connection that this process opens after installation."""

    def install(self, interceptor: Interceptor) -> None:
        def call(db: sqlite3.Connection, sql: str, do: Callable[[], Any]) -> Any:
            words = sql.split(None, 1)
            verb = words[0].upper().rstrip(";") if words else ""
            if verb not in (*_CHANGES, *_LOOKS):
                return do()
            table = _TABLE.search(sql)
            changes = verb in _CHANGES
            # Only a statement outside a transaction waits for a lock.
            waits = not db.in_transaction and verb != "ROLLBACK"
            return interceptor.call(
                verb,
                table[1] if table else "",
                do,
                changes=changes,
                locked=lambda: db.in_transaction,
                error=lambda: sqlite3.OperationalError("disk I/O error"),
                disk_full=_sqlite_full if changes else None,
                timeout=_locked if waits else None,
            )

        class Cursor(sqlite3.Cursor):
            def execute(self, sql: str, *args: Any) -> Any:
                return call(self.connection, sql, lambda: super(Cursor, self).execute(sql, *args))

            def executemany(self, sql: str, *args: Any) -> Any:
                do = super().executemany
                return call(self.connection, sql, lambda: do(sql, *args))

        class Connection(sqlite3.Connection):
            def cursor(self, factory: Any = Cursor) -> Any:
                return super().cursor(factory)

            def execute(self, sql: str, *args: Any) -> Any:
                return call(self, sql, lambda: super(Connection, self).execute(sql, *args))

            def executemany(self, sql: str, *args: Any) -> Any:
                return call(self, sql, lambda: super(Connection, self).executemany(sql, *args))

            def commit(self) -> None:
                call(self, "COMMIT", super().commit)

            # The C implementation commits without calling commit().
            def __exit__(self, *error: object) -> Any:
                end: Any = super().__exit__
                verb = "ROLLBACK" if error[0] else "COMMIT"
                return call(self, verb, lambda: end(*error))

        def connecting(do: Any) -> Any:
            def connect(*args: Any, **kwargs: Any) -> Any:
                kwargs.setdefault("factory", Connection)
                return do(*args, **kwargs)

            return connect

        replace(sqlite3, "connect", connecting)


def _locked() -> sqlite3.Error:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


def _sqlite_full() -> sqlite3.Error:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


# -- sockets -------------------------------------------------------------------------------------


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
                    timeout=_timed_out(self),
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
                    timeout=_timed_out(self),
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
