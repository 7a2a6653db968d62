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
    """The result of a run.

    :param received: Messages received from the source, or passed to the run.
    :param failed: Messages that a callback failed, in either stage.
    :param settled: Each message in one class: the sum is ``received``.
    :param batches: Batches handled, by batcher and by trigger.
    :param seconds: Seconds of each stage, in the run's own thread: ``receive``, ``process``,
        ``batch``, ``handle_batch``, ``settle``; and ``total``.  ``waited`` is the longest time that
        a message had waited at its broker, if known.
    :param ended: Why it stopped receiving: ``empty``, ``max_messages``, ``max_bytes``,
        ``max_seconds``, ``rate_limiting``, ``given``, ``error``, ``stopped``, or ``interrupted`` by
        an exception that is not a callback's.
    :param reasons: The reasons of failed messages, the most frequent first: ``count``, ``stage``
        (unknown here) and ``reason``.
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
        """Returns the counts, under the names of every report."""
        totals = self.settled.classes()
        return {
            "received": self.received,
            "failed": failures_of(self.failed, totals),
            **totals,
            "accounted": self.settled.total,
        }

    def trouble(self, fail_when: Any = "all") -> str:
        """Returns what needs attention in this run, as sentences; empty if it succeeded.

        That is: the sum does not balance, messages had lapsed, could not be settled or block those
        behind them, or as many failed as ``fail_when`` specifies: see
        :func:`airflow_broadway.core.custody.run_summary.failures_trouble`.
        """
        settled, totals = self.settled, self.totals()
        sentences = [
            "" if self.balanced else unbalanced_line(totals),
            settling_trouble(settled.lapsed, settled.failed, halted=settled.halted),
            failures_trouble(totals, fail_when),
        ]
        return ".  ".join(sentence for sentence in sentences if sentence)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as a JSON value."""
        return {
            **asdict(self),
            "settled": self.settled.to_json(),
            "balanced": self.balanced,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }
