"""The embedded queue for the custody contract."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.testing.contract import Harness


class SqliteHarness(Harness):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._path = path
        with SqliteQueue(path, "contract") as queue:
            queue.create()

    def producer(self) -> Producer:
        return SqliteProducer(queue="contract", path=self._path, lease=self.lease)

    def send(self, bodies: Sequence[bytes]) -> None:
        with SqliteQueue(self._path, "contract", clock=self.clock) as queue:
            queue.send(bodies)
