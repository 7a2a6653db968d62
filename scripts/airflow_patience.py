"""How long Airflow's SQLite waits for its file: on a busy machine its 5 seconds are too few, and a
request, or a scheduler, fails with ``database is locked``.  Airflow imports what its settings name.
"""

from __future__ import annotations

__all__ = ["ASYNC", "SYNC"]

#: What SQLite's two drivers get; seconds.
SYNC = {"timeout": 120.0}
ASYNC = {"timeout": 120.0}
