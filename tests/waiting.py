"""Waits for conditions that other threads or processes fulfil."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[..., object], timeout: float = 60.0) -> None:
    """Polls until ``condition`` holds.

    :raises AssertionError: After ``timeout`` seconds.
    """
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, f"the condition did not hold within {timeout:.0f} s"
        time.sleep(0.02)
