"""The brokers of the fault runs, and what each can tell about its messages without our reports.

Another broker takes part by an entry in :data:`BROKERS`, and a pipeline of its own in
``dags/killed_pipeline.py`` and ``dags/killed.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from airflow_broadway.producers.sqlite import SqliteQueue

__all__ = ["BROKERS", "Broker", "Dead"]


class Dead(NamedTuple):
    """One dead letter."""

    number: int
    attempt: int
    reason: str


class Broker(Protocol):
    """A queue called ``killed`` at a broker of this run's own."""

    def variables(self) -> Mapping[str, str]:
        """Environment variables for Airflow: the connections."""
        ...

    def send(self, bodies: Sequence[bytes]) -> None:
        """Enqueue messages."""
        ...

    def waiting(self) -> int:
        """Messages that are neither settled nor dead: ready, delayed or leased."""
        ...

    def leased(self) -> int:
        """Leases that are open, or what else still holds messages."""
        ...

    def dead(self) -> list[Dead]:
        """All dead letters."""
        ...

    def close(self) -> None:
        """Stop what was started."""
        ...


class Sqlite:
    """The embedded queue, in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "queue.db"
        self._queue = SqliteQueue(self._path, "killed")

    def variables(self) -> Mapping[str, str]:
        connection = {"conn_type": "broadway_sqlite", "host": str(self._path)}
        return {"AIRFLOW_CONN_KILLED_QUEUE": json.dumps(connection)}

    def send(self, bodies: Sequence[bytes]) -> None:
        self._queue.send(bodies)

    def waiting(self) -> int:
        depth = self._queue.depth()
        return depth.ready + depth.delayed + depth.leased

    def leased(self) -> int:
        return len(self._queue.leases())

    def dead(self) -> list[Dead]:
        return [
            Dead(int(letter.body), letter.attempt, letter.reason)
            for letter in self._queue.dead_letters(limit=None)
        ]

    def close(self) -> None:
        self._queue.close()


#: By name: makes the broker's queue, with its files in a folder.
BROKERS: Mapping[str, Callable[[Path], Broker]] = {"sqlite": Sqlite}
