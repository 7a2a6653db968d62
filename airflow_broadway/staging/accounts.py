"""Which plans count, and what the journals say: for settling a run and accounting for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from airflow_broadway.core.custody import SettleReport
from airflow_broadway.core.manifest import VERSION, BatchPlan, check_version, paths
from airflow_broadway.staging.run import GenerationRecord, StagedRun

if TYPE_CHECKING:
    from airflow_broadway.core.broadway import Broadway

__all__ = ["Journal", "plans_of", "read_journal", "record_settled", "standing_plans"]


class Journal(NamedTuple):
    """What settling one generation did.

    :param report: What the custodian reported at the end.
    :param settled_now: What callbacks had settled at once.
    """

    report: SettleReport
    settled_now: SettleReport
    at: str


def read_journal(run: StagedRun, generation: str) -> Journal | None:
    """The journal of a generation; ``None`` while it is not settled."""
    path = paths.settled(generation)
    try:
        value = json.loads(run.files.read(path))
    except FileNotFoundError:
        return None
    check_version(value, path)
    return Journal(
        SettleReport.from_json(value["report"]),
        SettleReport.from_json(value.get("settled_now") or {}),
        value["at"],
    )


def record_settled(run: StagedRun, record: GenerationRecord, report: SettleReport) -> None:
    """Journal what a run that settles by itself, with nothing staged, has settled."""
    at = run.clock.now().isoformat()
    value = {
        "version": VERSION,
        "generation": record.generation,
        "at": at,
        "report": report.to_json(),
        "settled_now": {},
    }
    run.files.create(paths.settled(record.generation), json.dumps(value))
    run.forget_open(record.generation)


def plans_of(run: StagedRun, pipeline: Broadway, generation: str) -> list[BatchPlan]:
    """The plan of each batcher that holds messages of a generation."""
    return [
        plan
        for batcher in pipeline.batchers
        for _, plan in _ranked(run, batcher)
        if generation in plan.generations
    ]


def standing_plans(run: StagedRun, batcher: str) -> list[BatchPlan]:
    """The plans of a batcher that the run went by: those with outcomes, else all."""
    found = list(_ranked(run, batcher))
    used = [plan for count, plan in found if count]
    return used or [plan for _, plan in found]


def _ranked(run: StagedRun, batcher: str) -> Iterator[tuple[int, BatchPlan]]:
    """For each set of generations the plan with most outcomes, and how many those are.

    Without any outcome it makes no difference which plan it is.
    """
    recorded = {
        name.removesuffix(".json")
        for name in run.files.list(paths.outcomes(batcher))
        if name.endswith(".json")
    }
    root = f"batches/{batcher}"
    for inputs in run.files.list(root):
        best: tuple[int, BatchPlan] | None = None
        for name in run.files.list(f"{root}/{inputs}"):
            try:
                plan, batches = BatchPlan.read(run.files, f"{root}/{inputs}/{name}")
            except FileNotFoundError:  # its planning never finished
                continue
            count = sum(batch.batch_id in recorded for batch in batches) if recorded else 0
            if best is None or count > best[0]:
                best = count, plan
        if best is not None:
            yield best
