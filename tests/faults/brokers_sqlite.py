"""The embedded queue in the fault runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from airflow_broadway.producers.sqlite import SqliteQueue
from tests.faults.broker import DeadLetter


class Sqlite:
    """An embedded queue in a file that only this run uses."""

    stable_ids = True

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

    def dead_letters(self) -> list[DeadLetter]:
        return [
            DeadLetter(int(letter.body), letter.attempt, letter.reason)
            for letter in self._queue.dead_letters(limit=None)
        ]

    def close(self) -> None:
        self._queue.close()
