"""Time, injected, so that no test sleeps."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """Where a component gets its time."""

    def now(self) -> datetime:
        """The present instant: aware, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds from a fixed but arbitrary origin; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    # The function itself: it is asked before each message.
    monotonic = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
