"""How long to wait before connecting again, and when to give it up: Broadway's four back-offs."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import TypeVar

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import BroadwayError, ProducerUnavailable
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions, backoff_bounds

log = logging.getLogger(__name__)

_Made = TypeVar("_Made")

#: Seconds between two looks at whether the run was told to stop.
_STOP_CHECK_INTERVAL = 0.5


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
        """Begin with the shortest delay again."""
        self._last = None


class Attempts:
    """One stretch of failures: paced by a back-off, and given up in the end.

    It goes on until :meth:`worked`: a connection that is made and fails at its first use is no
    better than none.

    :param seconds: For how long it is tried at most.
    :param stopping: Asked while it waits: who is told to stop waits for nothing.
    """

    def __init__(
        self,
        backoff: Backoff,
        seconds: float,
        clock: Clock,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backoff = backoff
        self._seconds = seconds
        self._clock = clock
        self._stopping = stopping
        self._end: float | None = None

    @classmethod
    def of(
        cls, options: RabbitMQOptions, clock: Clock, stopping: Callable[[], bool] = lambda: False
    ) -> Attempts:
        """Those that a producer's options ask for."""
        bounds = backoff_bounds(options.backoff_min, options.backoff_max)
        return cls(
            Backoff(options.backoff_type, *bounds), options.reconnect_timeout, clock, stopping
        )

    def worked(self) -> None:
        """End this stretch: the next failure begins another."""
        self._end = None
        self._backoff.reset()

    def again(self, error: BroadwayError) -> None:
        """Wait as the back-off says; after the first failure of a stretch, not at all.

        :param error: What failed.
        :raises BroadwayError: The error, if it is not to be tried again.
        """
        if self._end is not None:
            self.pause(error)
        self._begin()

    def pause(self, error: BroadwayError) -> None:
        """The same, but wait after the first failure too."""
        end = self._begin()
        pause, now = self._backoff.next(), self._clock.monotonic()
        if pause is None or now + pause > end or self._stopping():
            raise error
        log.warning("%s; trying again in %.1f s", error, pause)
        until = now + pause
        while (left := until - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, _STOP_CHECK_INTERVAL))
            if self._stopping():
                raise error

    def _begin(self) -> float:
        """When this stretch is given up: so long after its first failure."""
        if self._end is None:
            self._end = self._clock.monotonic() + self._seconds
        return self._end


def keep_trying(connect: Callable[[], _Made], attempts: Attempts) -> _Made:
    """What ``connect`` makes, tried again while the broker is unavailable.

    :raises ProducerUnavailable: If the attempts are at their end.
    """
    while True:
        try:
            return connect()
        except ProducerUnavailable as error:
            attempts.pause(error)
