"""The batches of a run, a page at a time, in any order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from airflow_broadway.core.formats.isolation import CRASHED
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun

#: Batches on a page.
PAGE: Final = 100

#: Maximum number of outcome files read per plan; a file may hold copies of a thousand.
MOST_FILES: Final = 1000
#: Maximum number of outcomes read to sort or filter batches by outcome, ...
MOST_SORTED: Final = 50_000
#: ... and to count the results of an active run.
MOST_OUTCOMES: Final = 1000

#: The sort keys of batches from the plan, ...
_BY_PLAN: Final[dict[str, Callable[[PlannedBatch], Any]]] = {
    "key": lambda batch: json.dumps(batch.batch_key, sort_keys=True),
    "messages": lambda batch: batch.size,
    "trigger": lambda batch: batch.trigger,
}
#: ... and from their outcomes.
_BY_OUTCOME: Final[dict[str, Callable[[Outcome], Any]]] = {
    "attempts": lambda outcome: outcome.try_number,
    "seconds": lambda outcome: outcome.seconds,
    "started": lambda outcome: outcome.started_at,
    "failed": lambda outcome: outcome.failed + outcome.missing,
    "reason": lambda outcome: outcome.error,
}
#: ``plan`` is the order of the plans: by batcher, then in the order in which batches were closed.
SORTS: Final = ("plan", *_BY_PLAN, *_BY_OUTCOME)

#: The filters: all batches, those without a recorded outcome, and those with failures.
STATES: Final = ("all", "open", "failed")


class StagedBatch(NamedTuple):
    """A batch of a run; without an outcome its handling has not started or not finished."""

    plan: BatchPlan
    planned: PlannedBatch
    outcome: Outcome | None = None

    @property
    def key(self) -> str:
        """The key, as JSON unless it is text; empty for a merged batch."""
        key = self.planned.batch_key if self.planned.keys <= 1 else ""
        return key if isinstance(key, str) else json.dumps(key, ensure_ascii=False)

    @property
    def result(self) -> str:
        """``succeeded``, ``failed``, ``some failed``, ``crashed`` (dead-lettered after a crash), or
        ``""`` without an outcome.
        """
        outcome = self.outcome
        if outcome is None:
            return ""
        if outcome.error.startswith(CRASHED):
            return "crashed"
        if outcome.error or not outcome.successful:
            return "failed"
        return "some failed" if outcome.failed or outcome.missing else "succeeded"


def staged_batches(
    recorded: Recorded, plans: Iterable[BatchPlan] | None = None, *, outcomes: bool = True
) -> Iterator[StagedBatch]:
    """Yields the batches of a run by batcher, in the order of their plans.

    :param plans: The standing plans to read; default: all of the run.
    :param outcomes: Whether to read their outcomes as well.
    """
    if plans is None:
        batchers = recorded.run.files.list("batches")
        plans = (plan for name in batchers for plan in recorded.standing(name))
    seen: set[tuple[str, str]] = set()
    for plan in plans:
        none = ((planned, None) for planned in recorded.batches(plan))
        for planned, outcome in recorded.outcomes(plan) if outcomes else none:
            if (plan.batcher, planned.batch_id) not in seen:
                seen.add((plan.batcher, planned.batch_id))
                yield StagedBatch(plan, planned, outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPage:
    """A page of the table.

    :param total: Number of batches that match the filter.
    :param page: Page number from 1 to ``pages``.
    :param sort: The sort key; not the requested one if ``too_many`` is true.
    :param too_many: Whether there are too many outcomes to sort or filter by them.
    """

    rows: Sequence[StagedBatch]
    total: int
    page: int
    pages: int
    sort: str
    descending: bool
    state: str
    batcher: str
    batchers: Sequence[str]
    too_many: bool


def reads_ahead(recorded: Recorded, plans: Sequence[BatchPlan], most: int = MOST_OUTCOMES) -> bool:
    """Reads the outcomes of plans if they are at most ``most``; returns whether they were read."""
    if sum(len(recorded.ids(plan)) for plan in plans) > most:
        return False
    return all(recorded.read_ahead(plan, MOST_FILES) for plan in plans)


def page_of_batches(
    run: StagedRun,
    *,
    page: int = 1,
    sort: str = "plan",
    descending: bool = False,
    state: str = "all",
    batcher: str = "",
    recorded: Recorded | None = None,
) -> BatchPage:
    """Returns a page of a run's batches; replaces unknown arguments by valid ones.

    :param sort: One of :data:`SORTS`; batches without the sort key come last.
    :param state: One of :data:`STATES`.
    :param batcher: Name of a batcher, or empty for all.
    :raises StagingError: If files cannot be read.
    """
    recorded = recorded or Recorded(run)
    sort, state = sort if sort in SORTS else "plan", state if state in STATES else "all"
    batchers = run.files.list("batches")
    chosen = [name for name in batchers if batcher in ("", name)]
    plans = [plan for name in chosen for plan in recorded.standing(name)]
    by_outcome = sort in _BY_OUTCOME or state == "failed"
    too_many = by_outcome and not reads_ahead(recorded, plans, MOST_SORTED)
    if too_many:
        sort = "plan" if sort in _BY_OUTCOME else sort
        state = "all" if state == "failed" else state
    batches = list(staged_batches(recorded, plans, outcomes=by_outcome and not too_many))
    if state == "open":
        batches = [row for row in batches if row.planned.batch_id not in recorded.ids(row.plan)]
    elif state == "failed":
        batches = [row for row in batches if row.outcome is not None and row.outcome.failed]
    batches = _sort_batches(batches, sort, descending=descending)
    pages = max(1, -(-len(batches) // PAGE))
    page = min(max(1, page), pages)
    return BatchPage(
        rows=_with_outcomes(recorded, plans, batches[(page - 1) * PAGE : page * PAGE]),
        total=len(batches),
        page=page,
        pages=pages,
        sort=sort,
        descending=descending,
        state=state,
        batcher=batcher if batcher in batchers else "",
        batchers=batchers,
        too_many=too_many,
    )


def _sort_batches(batches: list[StagedBatch], sort: str, *, descending: bool) -> list[StagedBatch]:
    if sort in _BY_PLAN:
        by_plan = _BY_PLAN[sort]
        return sorted(batches, key=lambda row: by_plan(row.planned), reverse=descending)
    if sort in _BY_OUTCOME:
        by_outcome = _BY_OUTCOME[sort]
        handled = [(row.outcome, row) for row in batches if row.outcome is not None]
        handled.sort(key=lambda pair: by_outcome(pair[0]), reverse=descending)
        return [*(row for _, row in handled), *(row for row in batches if row.outcome is None)]
    return batches[::-1] if descending else batches


def _with_outcomes(
    recorded: Recorded, plans: Iterable[BatchPlan], visible: Sequence[StagedBatch]
) -> list[StagedBatch]:
    outcomes: dict[tuple[str, str], Outcome] = {}
    for plan in plans:
        planned = [row.planned for row in visible if row.plan is plan]
        for batch_id, outcome in recorded.outcomes_of(plan, planned).items():
            outcomes[plan.path, batch_id] = outcome
    return [
        row._replace(outcome=outcomes.get((row.plan.path, row.planned.batch_id))) for row in visible
    ]
