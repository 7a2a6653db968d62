"""The boundary of SQLite: statements and commits."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from typing import Any

from airflow_broadway.testing.crashes.interceptor import Interceptor, replace

_CHANGES = ("INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "DROP", "ALTER", "COMMIT", "END")
_LOOKS = ("BEGIN", "SELECT", "WITH", "ROLLBACK")
_TABLE = re.compile(
    r"\b(?:INTO|UPDATE|FROM|TABLE|INDEX)\s+(?:IF NOT EXISTS\s+)?([\w.\"]+)", re.IGNORECASE
)


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
                error=_failed,
                full=_full if changes else None,
                hangs=_locked if waits else None,
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


def _failed() -> sqlite3.Error:
    return sqlite3.OperationalError("disk I/O error")


def _locked() -> sqlite3.Error:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


def _full() -> sqlite3.Error:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error
