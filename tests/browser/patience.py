"""How long Airflow's SQLite waits for its file: on a busy machine 5 seconds are too few."""

from __future__ import annotations

__all__ = ["ASYNC", "SYNC"]

SYNC = {"timeout": 60.0}
ASYNC = {"timeout": 60.0}
