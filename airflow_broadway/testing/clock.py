"""Clocks for tests: one that only moves when advanced, and one that skips waits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow_broadway.core.clock import SystemClock


class ManualClock:
    """A clock that only moves when advanced; ``sleep`` advances it without waiting.

    :param start: The initial time; aware.
    """

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed = timedelta()

    def now(self) -> datetime:
        """Returns the current time: aware, UTC."""
        return (self._start + self._elapsed).astimezone(UTC)

    def monotonic(self) -> float:
        """Returns the seconds by which the clock has been advanced."""
        return self._elapsed.total_seconds()

    def sleep(self, seconds: float) -> None:
        """Advances the clock by ``seconds``, if above 0 by at least a microsecond."""
        self.advance(max(seconds, 1e-6) if seconds > 0 else 0.0)

    def advance(self, seconds: float) -> None:
        """Advances the clock by ``seconds``, at least 0.

        :raises ValueError: If ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock never goes back, got: {seconds!r}")
        self._elapsed += timedelta(seconds=seconds)


class SkippingClock(SystemClock):
    """The real clock, advanced by skipped waits; not shared with other processes."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self._skipped)

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds
