"""The embedded queue, as the custody contract wants it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.testing.contract import Harness


class SkippingClock(SystemClock):
    """The real clock, which skips what it is asked to wait: other processes know no other."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self._skipped)

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds


class SqliteHarness(Harness):
    def __init__(self, path: str) -> None:
        self._path = path
        self._clock = SkippingClock()

    @property
    def clock(self) -> Clock:
        return self._clock

    def producer(self) -> Producer:
        return SqliteProducer(queue="contract", path=self._path, lease=self.lease)

    def send(self, bodies: Sequence[bytes]) -> None:
        with SqliteQueue(self._path, "contract", clock=self._clock) as queue:
            queue.send(bodies)

    def program(self) -> tuple[str, list[str]]:
        return "tests.contract.sqlite_harness:SqliteHarness", [self._path]
