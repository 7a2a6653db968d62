"""When it is told that a backlog has reached its bounds: once a crossing.

::

            the backlog reaches a bound, and the Dag may have another run
    armed ───────────────────────────────────────────────────────────────► told
      ▲                                                                      │
      └──────────────── a run was made, or the backlog fell ─────────────────┘

Nothing is lost.  While the Dag has as many runs as it may have, the crossing waits to be told: the
runs at work take what waits.  What was told and led to no run, as Airflow drops an event of a Dag
that is paused, is told again, later each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.model.backlog import Backlog
from airflow_broadway.core.text import many

log = logging.getLogger(__name__)

#: The longest wait after looks that failed, in seconds, unless the interval is longer.
MAX_BACKOFF: Final = 300.0
#: Seconds until what led to no run is told again; doubled each time, up to the second.
REPEAT: Final = 60.0
MAX_REPEAT: Final = 900.0
#: Seconds for which a crossing waits, at most, while the Dag has all the runs that it may have.
#: Airflow then keeps the event until one has ended.  Backfills cannot be told from other runs here.
MAX_HOLD: Final = 900.0


class Runs(NamedTuple):
    """The runs of a Dag.

    :param open: Those queued or at work.
    :param ever: All that Airflow knows.
    """

    open: int
    ever: int


@dataclass(slots=True)
class _Told:
    """A crossing that was told."""

    first: datetime
    ever: int
    times: int = 1
    #: On the monotonic clock: when it is told again, unless a run was made by then.
    again: float = 0.0


def reasons(bounds: Backlog, depth: QueueDepth) -> list[str]:
    """Which bounds a backlog has reached, in words; an age that is not known reaches none."""
    found = []
    if bounds.min_messages is not None and depth.ready >= bounds.min_messages:
        found.append(f"{many(depth.ready, 'message')} (min_messages={bounds.min_messages:,})")
    age = depth.oldest_age
    if bounds.max_age is not None and depth.ready and age is not None and age >= bounds.max_age:
        found.append(f"the oldest since {age:,.0f} s (max_age={bounds.max_age:,g})")
    return found


def described(depth: QueueDepth) -> str:
    """How full the queue is, in words."""
    text = many(depth.ready, "message")
    if not depth.ready:
        return text
    if depth.oldest_age is None:
        return f"{text}, the age of the oldest is not known"
    return f"{text}, the oldest since {depth.oldest_age:,.0f} s"


@dataclass(slots=True, kw_only=True)
class BacklogWatch:
    """Looks at a backlog again and again; takes nothing.

    :param bounds: When it is to be told.
    :param look: Asks how full the queue is; may block, and may raise.
    :param runs: Asks for the runs of the Dag; the same.  ``None``: there is no Dag, and the first
        crossing is the only one.
    :param max_runs: How many runs the Dag may have at a time.
    :param lag: Seconds by which a look may be behind: for so long nothing is told after a run was
        made or has ended, for what it took may still be counted.
    """

    bounds: Backlog
    look: Callable[[], QueueDepth | None]
    runs: Callable[[], Runs] | None = None
    max_runs: int = 1
    lag: float = 0.0
    clock: Clock = field(default_factory=SystemClock)
    _told: _Told | None = None
    _held_since: float | None = None
    #: The runs at the last look that asked for them, and when they were seen to change.
    _seen: Runs | None = None
    _changed_at: float = float("-inf")
    _failures: int = 0
    #: What is not known, and was said: once, until it is known again.
    _unknown: str = ""

    def step(self) -> tuple[dict[str, Any] | None, float]:
        """One look.

        :returns: What to tell, if anything, and the seconds until the next look.
        """
        try:
            found = self._step()
        except Exception as error:
            self._failures += 1
            most = max(MAX_BACKOFF, self.bounds.poke_interval)
            wait = min(most, self.bounds.poke_interval * 2.0 ** min(self._failures, 30))
            log.warning(
                "Could not look at the backlog (%s in a row), the next look is in %.0f s: %s: %s",
                many(self._failures, "failure"),
                wait,
                type(error).__name__,
                redacted(str(error)),
            )
            return None, wait
        if self._failures:
            log.info("Could look at the backlog again after %s.", many(self._failures, "failure"))
            self._failures = 0
        return found, self.bounds.poke_interval

    def _step(self) -> dict[str, Any] | None:
        at = self.clock.now()
        depth = self.look()
        self._say_unknown(depth)
        if depth is None:
            return None
        why = reasons(self.bounds, depth)
        if not why:
            self._told = self._held_since = None  # it fell
            return None
        runs = Runs(0, 0) if self.runs is None else self.runs()
        if self._seen is not None and runs != self._seen:
            self._changed_at = self.clock.monotonic()
        self._seen = runs
        self._rearm(runs)
        if self._is_due(runs):
            return self._tell(at, runs, depth, why)
        return None

    def _rearm(self, runs: Runs) -> None:
        """A run that was made since may not have taken what it will take: that is awaited by
        :meth:`_is_due`, as far as the Dag may have no further run.
        """
        if self._told is None:
            return
        if runs.ever > self._told.ever:
            self._told = None
        else:  # old runs may be deleted
            self._told.ever = runs.ever

    def _is_due(self, runs: Runs) -> bool:
        now = self.clock.monotonic()
        if runs.open >= self.max_runs:
            if self._held_since is None:
                self._held_since = now
                log.info("The backlog has reached its bounds; %s at work.", many(runs.open, "run"))
            if now - self._held_since < MAX_HOLD:
                return False
        else:
            self._held_since = None
            if now - self._changed_at < self.lag:
                return False
        return self._told is None or now >= self._told.again

    def _tell(self, at: datetime, runs: Runs, depth: QueueDepth, why: list[str]) -> dict[str, Any]:
        told = self._told
        if told is None:
            told = self._told = _Told(first=at, ever=runs.ever)
        else:
            told.times += 1
            log.warning(
                "What was told at %s has led to no run: told %d times by now.  Is the Dag paused,"
                " or at its max_active_runs?",
                told.first.isoformat(),
                told.times,
            )
        wait = min(MAX_REPEAT, REPEAT * 2.0 ** min(told.times - 1, 30))
        told.again = self.clock.monotonic() + wait
        self._held_since = None if runs.open < self.max_runs else self.clock.monotonic()
        return {
            "reason": " and ".join(why),
            "ready": depth.ready,
            "delayed": depth.delayed,
            "leased": depth.leased,
            "dead": depth.dead,
            "oldest_age": depth.oldest_age,
            "at": at.isoformat(),
            "crossing": told.first.isoformat(),
            "told": told.times,
        }

    def _say_unknown(self, depth: QueueDepth | None) -> None:
        """Say once what is not known: it is never taken for 0."""
        unknown = ""
        if depth is None:
            unknown = "The broker does not say how full the queue is"
        elif self.bounds.max_age is not None and depth.ready and depth.oldest_age is None:
            unknown = "The age of the oldest message is not known, so max_age starts no run"
        if unknown and unknown != self._unknown:
            log.warning("%s.", unknown)
        self._unknown = unknown
