"""How long to wait before connecting again: Broadway's four kinds of back-off."""

from __future__ import annotations

import random

from airflow_broadway.core.errors import OptionsError

__all__ = ["TYPES", "Backoff", "bounds"]

TYPES = ("rand_exp", "exp", "rand", "stop")
_MIN, _MAX = 1.0, 30.0


def bounds(low: float | None, high: float | None) -> tuple[float, float]:
    """The bounds in seconds; one that is not given follows from the other.

    :raises OptionsError: If the lower is above the upper.
    """
    if low is None and high is None:
        return _MIN, _MAX
    if low is None:
        assert high is not None
        return min(_MIN, high), high
    if high is None:
        return low, max(low, _MAX)
    if low > high:
        raise OptionsError("RabbitMQProducer.backoff_min", f"at most backoff_max ({high})", low)
    return low, high


class Backoff:
    """The delays of one stretch of failures; :meth:`reset` after a success."""

    def __init__(self, kind: str, low: float, high: float, *, seed: int | None = None) -> None:
        self._kind = kind
        self._low, self._high = low, high
        self._last: float | None = None
        self._random = random.Random(seed)

    def next(self) -> float | None:
        """Seconds to wait; ``None``: do not connect again."""
        low, high, last = self._low, self._high, self._last
        draw = self._random.uniform
        if self._kind == "stop":
            return None
        if self._kind == "rand":
            return draw(low, high)
        if self._kind == "exp":
            self._last = low if last is None else min(2 * last, high)
        elif last is None:
            self._last = min(draw(low, 3 * low), high)
        else:
            self._last = draw(min(last, max(low, high / 3)), min(3 * last, high))
        return self._last

    def reset(self) -> None:
        """Begin anew."""
        self._last = None
