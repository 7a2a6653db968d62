"""The report of a run in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_broadway.core.custody.report import SettleReport, failures_of
from airflow_broadway.core.custody.run_summary import (
    failures_trouble,
    settling_trouble,
    unbalanced_line,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What a run did.

    :param received: Messages taken from the source, or given.
    :param failed: Messages that a callback failed, at either stage.
    :param settled: Each message in one class: the sum is ``received``.
    :param batches: Batches handled, by batcher and by trigger.
    :param seconds: Of each stage, in the run's own thread: ``receive``, ``process``, ``batch``,
        ``handle_batch``, ``settle``; and ``total``.  And ``waited``: for how long, at the most, a
        message had waited at its broker, where that is known.
    :param ended: Why it stopped taking messages: ``empty``, ``max_messages``, ``max_bytes``,
        ``max_seconds``, ``rate_limiting``, ``given``, ``error``, ``stopped``, or ``interrupted``
        by what is no callback's error.
    :param reasons: Why messages failed, the most frequent reasons first: ``count``, ``stage`` (not
        known here) and ``reason``.
    """

    pipeline: str
    generation: str
    received: int
    received_bytes: int
    failed: int
    settled: SettleReport
    batches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""
    reasons: Sequence[Mapping[str, Any]] = ()

    @property
    def balanced(self) -> bool:
        """Whether every message received is accounted for."""
        return self.settled.total == self.received

    def totals(self) -> dict[str, int]:
        """The figures, under the names that every report has."""
        totals = self.settled.classes()
        return {
            "received": self.received,
            "failed": failures_of(self.failed, totals),
            **totals,
            "accounted": self.settled.total,
        }

    def trouble(self, fail_when: Any = "all") -> str:
        """Why people should look at this run, as sentences; empty if it went well.

        It did not if the sum does not balance, if messages had lapsed, could not be settled or
        halted what is behind them, or if so many failed as ``fail_when`` says: see
        :func:`airflow_broadway.core.custody.run_summary.failures_trouble`.
        """
        settled, totals = self.settled, self.totals()
        found = [
            "" if self.balanced else unbalanced_line(totals),
            settling_trouble(settled.lapsed, settled.failed, halted=settled.halted),
            failures_trouble(totals, fail_when),
        ]
        return ".  ".join(each for each in found if each)

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON value."""
        return {
            **asdict(self),
            "settled": self.settled.to_json(),
            "balanced": self.balanced,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }
