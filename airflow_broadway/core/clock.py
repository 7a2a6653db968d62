"""Injected time sources, so that no test sleeps."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """A component's source of time."""

    def now(self) -> datetime:
        """Returns the current time: aware, UTC."""

    def monotonic(self) -> float:
        """Returns seconds from a fixed but arbitrary origin; never decreases."""

    def sleep(self, seconds: float) -> None:
        """Blocks for ``seconds``."""


class SystemClock:
    """The system clock."""

    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    # Bound directly, without a wrapper: it is called before each message.
    monotonic = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
