"""How long Airflow's SQLite waits for its file: on a busy machine its 5 seconds are too few, and a
request, or a scheduler, fails with ``database is locked``.  Airflow imports what its settings name.

The API server writes its audit log from within its event loop.  Whoever has the file then may need
that very loop to come to its end, so that both would wait for each other: so who asks from a loop
waits for those 5 seconds only, and is answered with an error of the database: ``airflow_api`` then
asks again.
"""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

#: Seconds.
_PATIENCE, _PATIENCE_OF_A_LOOP = 120.0, 5.0


class _Connection(sqlite3.Connection):
    """Waits as long as its caller does."""

    def cursor(self, *args: Any, **named: Any) -> Any:
        self._be_patient()
        return super().cursor(*args, **named)

    def commit(self) -> None:
        self._be_patient()
        super().commit()

    def _be_patient(self) -> None:
        try:
            asyncio.get_running_loop()
            seconds = _PATIENCE_OF_A_LOOP
        except RuntimeError:
            seconds = _PATIENCE
        super().execute(f"PRAGMA busy_timeout = {1000 * seconds:.0f}")


#: What SQLite's two drivers get; that of coroutines waits in a thread of its own.
SYNC = {"timeout": _PATIENCE, "factory": _Connection}
ASYNC = {"timeout": _PATIENCE}
