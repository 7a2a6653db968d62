"""Waiting for what another thread or process does: as short as it takes, and not forever."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[..., object], timeout: float = 60.0) -> None:
    """Return once ``condition`` holds.

    :raises AssertionError: If it does not within ``timeout`` seconds.
    """
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, f"it did not come true in {timeout:.0f} s"
        time.sleep(0.02)
