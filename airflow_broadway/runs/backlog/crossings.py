"""Reports that a backlog has reached its bounds, once per crossing.

::

            the backlog reaches a bound, and the Dag may have another run
    armed ───────────────────────────────────────────────────────────────► reported
      ▲                                                                      │
      └──────────── a run was created, or the backlog decreased ─────────────┘

No crossing is lost.  While the Dag is at its maximum number of runs, the report is delayed: the
active runs drain the backlog.  A report that leads to no run, for example because Airflow drops the
events of a paused Dag, is repeated with increasing delay.
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
from airflow_broadway.core.text import pluralize

log = logging.getLogger(__name__)

#: Maximum backoff after failed checks in seconds, unless the interval is longer.
MAX_BACKOFF: Final = 300.0
#: Seconds until a report that led to no run is repeated, doubled each time; and their maximum.
REPEAT: Final = 60.0
MAX_REPEAT: Final = 900.0
#: Maximum seconds by which a report is delayed while the Dag is at its maximum number of runs.
#: Airflow then keeps the event until a run ends.  Backfills count like other runs here.
MAX_HOLD: Final = 900.0


class Runs(NamedTuple):
    """The runs of a Dag.

    :param open: Queued and running ones.
    :param ever: All in Airflow's database.
    """

    open: int
    ever: int


@dataclass(slots=True)
class _Report:
    """A reported crossing."""

    first: datetime
    ever: int
    times: int = 1
    #: Monotonic time at which it is repeated, unless a run was created by then.
    again: float = 0.0


def reasons(bounds: Backlog, depth: QueueDepth) -> list[str]:
    """Describes the bounds that a backlog has reached; an unknown age reaches none."""
    reached = []
    if bounds.min_messages is not None and depth.ready >= bounds.min_messages:
        count = pluralize(depth.ready, "message")
        reached.append(f"{count} (min_messages={bounds.min_messages:,})")
    age = depth.oldest_age
    if bounds.max_age is not None and depth.ready and age is not None and age >= bounds.max_age:
        reached.append(f"the oldest since {age:,.0f} s (max_age={bounds.max_age:,g})")
    return reached


def described(depth: QueueDepth) -> str:
    """Describes the depth of a queue."""
    text = pluralize(depth.ready, "message")
    if not depth.ready:
        return text
    if depth.oldest_age is None:
        return f"{text}, the age of the oldest is not known"
    return f"{text}, the oldest since {depth.oldest_age:,.0f} s"


@dataclass(slots=True, kw_only=True)
class BacklogWatch:
    """Checks a backlog periodically without receiving.

    :param bounds: The bounds that trigger a report.
    :param look: Reads the depth of the queue; may block and may raise.
    :param runs: Reads the runs of the Dag; may block and may raise.  ``None`` if there is no Dag;
        then only the first crossing is reported.
    :param max_runs: Maximum number of active runs of the Dag.
    :param lag: Staleness of the depth in seconds.  For so long after a run was created or has ended
        nothing is reported, since the depth may still count the messages that it received.
    """

    bounds: Backlog
    look: Callable[[], QueueDepth | None]
    runs: Callable[[], Runs] | None = None
    max_runs: int = 1
    lag: float = 0.0
    clock: Clock = field(default_factory=SystemClock)
    _reported: _Report | None = None
    _held_since: float | None = None
    #: The runs at the last check that read them, and the time of their last change.
    _last_runs: Runs | None = None
    _changed_at: float = float("-inf")
    _failures: int = 0
    #: The last warning about an unknown value, logged once until the value is known again.
    _unknown: str = ""

    def step(self) -> tuple[dict[str, Any] | None, float]:
        """Checks once.

        :returns: The event to report, if any, and the seconds until the next check.
        """
        try:
            event = self._step()
        except Exception as error:
            self._failures += 1
            most = max(MAX_BACKOFF, self.bounds.poke_interval)
            wait = min(most, self.bounds.poke_interval * 2.0 ** min(self._failures, 30))
            log.warning(
                "Could not look at the backlog (%s in a row), the next look is in %.0f s: %s: %s",
                pluralize(self._failures, "failure"),
                wait,
                type(error).__name__,
                redacted(str(error)),
            )
            return None, wait
        if self._failures:
            count = pluralize(self._failures, "failure")
            log.info("Could look at the backlog again after %s.", count)
            self._failures = 0
        return event, self.bounds.poke_interval

    def _step(self) -> dict[str, Any] | None:
        at = self.clock.now()
        depth = self.look()
        self._log_unknown(depth)
        if depth is None:
            return None
        met = reasons(self.bounds, depth)
        if not met:
            self._reported = self._held_since = None  # the backlog decreased
            return None
        runs = Runs(0, 0) if self.runs is None else self.runs()
        if self._last_runs is not None and runs != self._last_runs:
            self._changed_at = self.clock.monotonic()
        self._last_runs = runs
        self._rearm(runs)
        if self._is_due(runs):
            return self._event(at, runs, depth, met)
        return None

    def _rearm(self, runs: Runs) -> None:
        """Rearms once a run was created.

        That run may not have drained the backlog yet; :meth:`_is_due` waits for it while the Dag is
        at its maximum number of runs.
        """
        if self._reported is None:
            return
        if runs.ever > self._reported.ever:
            self._reported = None
        else:  # old runs may have been deleted
            self._reported.ever = runs.ever

    def _is_due(self, runs: Runs) -> bool:
        now = self.clock.monotonic()
        if runs.open >= self.max_runs:
            if self._held_since is None:
                self._held_since = now
                active = pluralize(runs.open, "run")
                log.info("The backlog has reached its bounds; %s active.", active)
            if now - self._held_since < MAX_HOLD:
                return False
        else:
            self._held_since = None
            if now - self._changed_at < self.lag:
                return False
        return self._reported is None or now >= self._reported.again

    def _event(self, at: datetime, runs: Runs, depth: QueueDepth, met: list[str]) -> dict[str, Any]:
        report = self._reported
        if report is None:
            report = self._reported = _Report(first=at, ever=runs.ever)
        else:
            report.times += 1
            log.warning(
                "The event of %s has led to no run: reported %d times by now.  Is the Dag paused,"
                " or at its max_active_runs?",
                report.first.isoformat(),
                report.times,
            )
        wait = min(MAX_REPEAT, REPEAT * 2.0 ** min(report.times - 1, 30))
        report.again = self.clock.monotonic() + wait
        self._held_since = None if runs.open < self.max_runs else self.clock.monotonic()
        return {
            "reason": " and ".join(met),
            **depth._asdict(),
            "at": at.isoformat(),
            "crossing": report.first.isoformat(),
            "reports": report.times,
        }

    def _log_unknown(self, depth: QueueDepth | None) -> None:
        """Logs once that a value is unknown; unknown is never treated as 0."""
        unknown = ""
        if depth is None:
            unknown = "The broker does not say how full the queue is"
        elif self.bounds.max_age is not None and depth.ready and depth.oldest_age is None:
            unknown = "The age of the oldest message is not known, so max_age starts no run"
        if unknown and unknown != self._unknown:
            log.warning("%s.", unknown)
        self._unknown = unknown
