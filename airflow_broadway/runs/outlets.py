"""The results of a task's batches, for the asset events of its outlets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.staging.run_folder import StagedRun

#: Maximum number of batch ids in an event, since events are stored in Airflow's database.
MAX_IDS: Final = 1_000


@dataclass(slots=True)
class Produced:
    """The results of the batches of one or several batchers.

    :param batches: Batches in which at least one message succeeded.
    :param successful: Messages that succeeded.
    :param failed: Messages of these batches that failed.
    """

    batches: int = 0
    successful: int = 0
    failed: int = 0
    batch_ids: list[str] = field(default_factory=list)

    def add(self, other: Produced) -> None:
        """Adds the results of another batcher."""
        self.batches += other.batches
        self.successful += other.successful
        self.failed += other.failed
        self.batch_ids += other.batch_ids

    def extra(self, pipeline: str) -> dict[str, Any]:
        """Returns the ``extra`` of the event, with at most :data:`MAX_IDS` ids."""
        return {
            "pipeline": pipeline,
            "batches": self.batches,
            "successful": self.successful,
            "failed": self.failed,
            "batch_ids": self.batch_ids[:MAX_IDS],
            "batch_ids_left_out": max(0, self.batches - MAX_IDS),
        }


def produced(run: StagedRun, heads: Iterable[BatchPlan]) -> Mapping[str, Produced]:
    """Reads the outcomes of plans and adds them up per batcher.

    :raises StagingError: If outcomes cannot be read.
    """
    from airflow_broadway.staging.plan_choice import Recorded  # loads pyarrow

    recorded = Recorded(run)
    by_batcher: dict[str, Produced] = {}
    for head in heads:
        total = by_batcher.setdefault(head.batcher, Produced())
        for _, outcome in recorded.outcomes(head):
            if outcome is not None and outcome.successful:
                one = Produced(1, outcome.successful, outcome.failed)
                if total.batches < MAX_IDS:
                    one.batch_ids.append(outcome.batch_id)
                total.add(one)
    return by_batcher
