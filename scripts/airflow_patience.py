"""How long Airflow's SQLite waits for its file: on a busy machine its 5 seconds are too few, and a
request, or a scheduler, fails with ``database is locked``.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ASYNC", "PATIENCE", "SYNC"]

SYNC = {"timeout": 120.0}
ASYNC = {"timeout": 120.0}

#: Airflow's settings that name them.
PATIENCE: Final = {
    "database.sql_alchemy_connect_args": f"{__name__}.SYNC",
    "database.sql_alchemy_connect_args_async": f"{__name__}.ASYNC",
}
