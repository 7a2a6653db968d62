"""The embedded queue in the traffic tests: ``send`` confirms; ``sqlite3`` drains."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from airflow_broadway.producers.sqlite import SqliteQueue
from tests.traffic.brokers import DEAD, QueuedMessage
from tests.traffic.publisher import body_of, number_of

_MESSAGES = """
    SELECT body, lease, ready_at, giver, deliveries FROM messages JOIN bodies USING (id)
"""
_DEAD = "SELECT body, deliveries FROM dead JOIN bodies USING (id)"


class _Sender:
    def __init__(self, path: Path) -> None:
        self._queue = SqliteQueue(path, "traffic")

    def send(self, numbers: Sequence[int]) -> Sequence[int]:
        self._queue.send([body_of(number) for number in numbers])
        return numbers

    def close(self) -> None:
        self._queue.close()


class SqliteTraffic:
    """An embedded queue in a new file."""

    kind = "sqlite"
    connections: Mapping[str, Mapping[str, Any]] = {}

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "queue.db"
        with SqliteQueue(self._path, "traffic") as queue:
            queue.create()
        self.options: Mapping[str, Any] = {"queue": "traffic", "path": str(self._path)}

    def group_of(self, number: int) -> None:
        pass

    def is_unlocked(self) -> bool:
        try:
            with closing(sqlite3.connect(self._path, timeout=0.1, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                db.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return False
        return True

    def sender(self) -> _Sender:
        return _Sender(self._path)

    def drain(self) -> list[QueuedMessage]:
        now = time.time() * 1_000_000
        messages: list[QueuedMessage] = []
        with closing(sqlite3.connect(self._path, timeout=60.0)) as db, db:
            for body, lease, ready_at, giver, deliveries in db.execute(_MESSAGES):
                place = (
                    "leased"
                    if lease is not None
                    else "delay"
                    if ready_at > now
                    else "returns"
                    if giver is not None
                    else "source"
                )
                messages.append(QueuedMessage(number_of(body), place, deliveries > 0))
            messages += [
                QueuedMessage(number_of(body), DEAD, deliveries > 1)
                for body, deliveries in db.execute(_DEAD)
            ]
            db.execute("DELETE FROM messages")
            db.execute("DELETE FROM dead")
        return messages
