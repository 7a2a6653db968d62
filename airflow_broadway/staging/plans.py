"""Which plans of a run count, and what has become of their batches.

A batcher's task may be tried or cleared any number of times; each time may leave a plan, in a
folder of its own.  Of the plans of the same generations the one whose batches have outcomes stands,
or else the newest; among plans of different generations, the newest that holds the one in question.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from airflow_broadway.core.manifest import BatchPlan, Outcome, PlannedBatch, paths
from airflow_broadway.staging.run import StagedRun

if TYPE_CHECKING:
    from airflow_broadway.core.broadway import Broadway

__all__ = [
    "counted_plans",
    "outcomes_of",
    "planned_elsewhere",
    "plans_of",
    "standing_plan",
    "standing_plans",
]


def standing_plan(run: StagedRun, folder: str) -> tuple[int, BatchPlan] | None:
    """The plan in ``batches/<batcher>/<inputs>`` that stands, and how many outcomes it has."""
    best: tuple[int, BatchPlan] | None = None
    tries = run.files.list(folder)
    recorded = _recorded(run, f"{folder}/{tries[0]}") if tries else set()
    for name in tries:  # oldest first
        try:
            plan, batches = BatchPlan.read(run.files, f"{folder}/{name}")
        except FileNotFoundError:  # never finished
            continue
        count = sum(batch.batch_id in recorded for batch in batches) if recorded else 0
        if best is None or count >= best[0]:
            best = count, plan
    return best


def planned_elsewhere(run: StagedRun, batcher: str, inputs: str) -> set[str]:
    """The generations that plans of a batcher hold whose inputs are others than ``inputs``."""
    top = f"batches/{batcher}"
    found: set[str] = set()
    for other in run.files.list(top):
        for name in run.files.list(f"{top}/{other}") if other != inputs else ():
            try:
                found.update(BatchPlan.read(run.files, f"{top}/{other}/{name}")[0].generations)
            except FileNotFoundError:  # never finished
                continue
    return found


def standing_plans(run: StagedRun, batcher: str) -> list[BatchPlan]:
    """The standing plans of a batcher, one for each set of generations, oldest first."""
    top = f"batches/{batcher}"
    found = (standing_plan(run, f"{top}/{inputs}") for inputs in run.files.list(top))
    plans = [each[1] for each in found if each is not None]
    return sorted(plans, key=lambda plan: plan.path.rpartition("/")[2])


def counted_plans(run: StagedRun, batcher: str) -> list[BatchPlan]:
    """The standing plans of a batcher without those that are void: none of their batches was
    handled, and a cleared ``process`` has brought newer ones.
    """
    plans = standing_plans(run, batcher)
    return [plan for plan in plans if plan is plans[-1] or _recorded(run, plan.path)]


def plans_of(run: StagedRun, pipeline: Broadway, generation: str) -> list[BatchPlan]:
    """The plans that decide about a generation's messages: one for each batcher at most."""
    made: list[BatchPlan] = []
    for batcher in pipeline.batchers:
        plans = [each for each in standing_plans(run, batcher) if generation in each.generations]
        made += plans[-1:]
    return made


def outcomes_of(run: StagedRun, plan: BatchPlan) -> Iterator[tuple[PlannedBatch, Outcome | None]]:
    """The batches of a plan in order, each with its outcome where one is recorded."""
    recorded = _recorded(run, plan.path)
    _, batches = BatchPlan.read(run.files, plan.path)
    for planned in batches:
        if planned.batch_id in recorded:
            path = paths.outcome(plan.path, planned.batch_id)
            yield planned, Outcome.loads(run.files.read(path), path)
        else:
            yield planned, None


def _recorded(run: StagedRun, plan: str) -> set[str]:
    """The ids of the batches, planned from a plan's generations, that have an outcome."""
    names = run.files.list(paths.outcomes(plan))
    return {name.removesuffix(".json") for name in names if name.endswith(".json")}
