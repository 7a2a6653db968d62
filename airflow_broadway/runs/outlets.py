"""What a task's batches produced, for the asset events of its outlets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.staging.run_folder import StagedRun

#: Batches whose ids an event has, at most: events lie in Airflow's database.
MAX_IDS: Final = 1_000


@dataclass(slots=True)
class Produced:
    """What the batches of one batcher, or of several, came to.

    :param batches: Those with an outcome in which any message succeeded.
    :param successful: Messages.
    :param failed: Messages of these batches.
    """

    batches: int = 0
    successful: int = 0
    failed: int = 0
    batch_ids: list[str] = field(default_factory=list)

    def add(self, other: Produced) -> None:
        """Count what another batcher's came to."""
        self.batches += other.batches
        self.successful += other.successful
        self.failed += other.failed
        self.batch_ids += other.batch_ids

    def extra(self, pipeline: str) -> dict[str, Any]:
        """What the event says; with no more than :data:`MAX_IDS` ids."""
        return {
            "pipeline": pipeline,
            "batches": self.batches,
            "successful": self.successful,
            "failed": self.failed,
            "batch_ids": self.batch_ids[:MAX_IDS],
            "batch_ids_left_out": max(0, self.batches - MAX_IDS),
        }


def produced(run: StagedRun, heads: Iterable[BatchPlan]) -> Mapping[str, Produced]:
    """What came of the batches of some plans, by batcher; reads their outcomes.

    :raises StagingError: If outcomes cannot be read.
    """
    from airflow_broadway.staging.plan_choice import Recorded  # loads pyarrow

    recorded = Recorded(run)
    found: dict[str, Produced] = {}
    for head in heads:
        total = found.setdefault(head.batcher, Produced())
        for _, outcome in recorded.outcomes(head):
            if outcome is not None and outcome.successful:
                one = Produced(1, outcome.successful, outcome.failed)
                if total.batches < MAX_IDS:
                    one.batch_ids.append(outcome.batch_id)
                total.add(one)
    return found
