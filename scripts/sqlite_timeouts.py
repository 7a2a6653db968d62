"""Longer lock timeouts for Airflow's SQLite database; Airflow's settings name these arguments.

With the default of 5 s, requests and the scheduler fail with ``database is locked`` on a busy
machine.  Statements in an event loop keep the 5 s: the API server writes its audit log there, and
the holder of the lock may need that loop, which would be a deadlock.  ``airflow_api`` retries such
errors.
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

#: Seconds.
_TIMEOUT, _LOOP_TIMEOUT = 120.0, 5.0


class _Connection(sqlite3.Connection):
    """A connection whose lock timeout depends on whether its thread runs an event loop."""

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        self._set_timeout()
        return super().cursor(*args, **kwargs)

    def commit(self) -> None:
        self._set_timeout()
        super().commit()

    def _set_timeout(self) -> None:
        try:
            asyncio.get_running_loop()
            seconds = _LOOP_TIMEOUT
        except RuntimeError:
            seconds = _TIMEOUT
        super().execute(f"PRAGMA busy_timeout = {1000 * seconds:.0f}")


#: The arguments of SQLite's two drivers; the asynchronous one waits in a separate thread.
SYNC = {"timeout": _TIMEOUT, "factory": _Connection}
ASYNC = {"timeout": _TIMEOUT}
