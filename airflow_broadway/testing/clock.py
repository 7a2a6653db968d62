"""Clocks for tests: one that stands still until it is moved, and one that skips what it waits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow_broadway.core.clock import SystemClock


class ManualClock:
    """Time by hand: nothing waits, and ``sleep`` moves the clock instead.

    :param start: The first instant; aware.
    """

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed = timedelta()

    def now(self) -> datetime:
        """The present instant: aware, UTC."""
        return (self._start + self._elapsed).astimezone(UTC)

    def monotonic(self) -> float:
        """Seconds by which the clock has been moved."""
        return self._elapsed.total_seconds()

    def sleep(self, seconds: float) -> None:
        """Move the clock by ``seconds``, if not 0 by a microsecond at least; return at once."""
        self.advance(max(seconds, 1e-6) if seconds > 0 else 0.0)

    def advance(self, seconds: float) -> None:
        """Move the clock by ``seconds``, at least 0.

        :raises ValueError: If that is back.
        """
        if seconds < 0:
            raise ValueError(f"a clock never goes back, got: {seconds!r}")
        self._elapsed += timedelta(seconds=seconds)


class SkippingClock(SystemClock):
    """The real clock, moved on by whatever it is asked to wait; other processes know no other."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self._skipped)

    def monotonic(self) -> float:
        return super().monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        self._skipped += seconds
