"""The batches of a run, a page at a time, in any order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A batch in the table.

    :param key: The key, as JSON unless it is text; empty for a merged batch.
    :param keys: Number of keys in it.
    :param part: Whether it is a part of a batch that was split after a crash.
    :param outcome: ``succeeded``, ``failed``, ``some failed``, ``crashed`` (dead-lettered after a
        crash), or ``""`` without a recorded outcome.
    :param attempt: The try number of the task that handled it.
    :param reason: The error that failed the whole batch.
    """

    batcher: str
    batch_id: str
    key: str
    keys: int
    messages: int
    trigger: str
    redelivered: int
    part: bool
    outcome: str
    successful: int | None = None
    failed: int | None = None
    missing: int | None = None
    attempt: int | None = None
    seconds: float | None = None
    started_at: str = ""
    reason: str = ""
    writer: str = ""
    application_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPage:
    """A page of the table.

    :param total: Number of batches that match the filter.
    :param page: Page number from 1 to ``pages``.
    :param sort: The sort key; not the requested one if ``too_many`` is true.
    :param too_many: Whether there are too many outcomes to sort or filter by them.
    """

    rows: Sequence[BatchRow]
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


class _Place(NamedTuple):
    plan: BatchPlan
    batch: PlannedBatch


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
    places = list(_iter_distinct(recorded, plans))
    wants_outcomes = sort in _BY_OUTCOME or state == "failed"
    too_many = wants_outcomes and not reads_ahead(recorded, plans, MOST_SORTED)
    if too_many:
        sort = "plan" if sort in _BY_OUTCOME else sort
        state = "all" if state == "failed" else state
    places = [place for place in places if _is_in(recorded, place, state)]
    places = _sort_places(recorded, places, sort, descending=descending)
    pages = max(1, -(-len(places) // PAGE))
    page = min(max(1, page), pages)
    visible = places[(page - 1) * PAGE : page * PAGE]
    return BatchPage(
        rows=_rows(recorded, visible),
        total=len(places),
        page=page,
        pages=pages,
        sort=sort,
        descending=descending,
        state=state,
        batcher=batcher if batcher in batchers else "",
        batchers=batchers,
        too_many=too_many,
    )


def _iter_distinct(recorded: Recorded, plans: Iterable[BatchPlan]) -> Iterable[_Place]:
    """Yields the batches of plans in order, without the duplicates of later plans."""
    seen: set[tuple[str, str]] = set()
    for plan in plans:
        for batch in recorded.batches(plan):
            if (plan.batcher, batch.batch_id) not in seen:
                seen.add((plan.batcher, batch.batch_id))
                yield _Place(plan, batch)


def _is_in(recorded: Recorded, place: _Place, state: str) -> bool:
    has_one = place.batch.batch_id in recorded.ids(place.plan)
    if state == "open":
        return not has_one
    if state == "failed":
        return has_one and bool(_outcome_of(recorded, place).failed)
    return True


def _outcome_of(recorded: Recorded, place: _Place) -> Outcome:
    return recorded.outcomes_of(place.plan, [place.batch])[place.batch.batch_id]


def _sort_places(
    recorded: Recorded, places: list[_Place], sort: str, *, descending: bool
) -> list[_Place]:
    if sort in _BY_PLAN:
        by_plan = _BY_PLAN[sort]
        return sorted(places, key=lambda place: by_plan(place.batch), reverse=descending)
    if sort in _BY_OUTCOME:
        by_outcome = _BY_OUTCOME[sort]
        with_one = [place for place in places if place.batch.batch_id in recorded.ids(place.plan)]
        last = [place for place in places if place.batch.batch_id not in recorded.ids(place.plan)]
        with_one.sort(
            key=lambda place: by_outcome(_outcome_of(recorded, place)), reverse=descending
        )
        return with_one + last
    return places[::-1] if descending else places


def _rows(recorded: Recorded, visible: Sequence[_Place]) -> list[BatchRow]:
    by_plan: dict[str, list[_Place]] = {}
    for place in visible:
        by_plan.setdefault(place.plan.path, []).append(place)
    results: dict[tuple[str, str], Outcome] = {}
    for path, places in by_plan.items():
        outcomes = recorded.outcomes_of(places[0].plan, [place.batch for place in places])
        results |= {(path, batch_id): outcome for batch_id, outcome in outcomes.items()}
    return [_row(place, results.get((place.plan.path, place.batch.batch_id))) for place in visible]


def _row(place: _Place, outcome: Outcome | None) -> BatchRow:
    batch = place.batch
    fields: dict[str, Any] = {
        "batcher": place.plan.batcher,
        "batch_id": batch.batch_id,
        "key": _format_key(batch),
        "keys": batch.keys,
        "messages": batch.size,
        "trigger": batch.trigger,
        "redelivered": batch.redelivered,
        "part": batch.part is not None,
    }
    if outcome is None:
        return BatchRow(**fields, outcome="")
    return BatchRow(
        **fields,
        outcome=_describe_outcome(outcome),
        successful=outcome.successful,
        failed=outcome.failed,
        missing=outcome.missing,
        attempt=outcome.try_number,
        seconds=outcome.seconds,
        started_at=outcome.started_at,
        reason=outcome.error,
        writer=outcome.writer,
        application_id=outcome.application_id,
    )


def _format_key(batch: PlannedBatch) -> str:
    if batch.keys > 1:
        return ""
    key = batch.batch_key
    return key if isinstance(key, str) else json.dumps(key, ensure_ascii=False)


def _describe_outcome(outcome: Outcome) -> str:
    if outcome.error.startswith(CRASHED):
        return "crashed"
    if outcome.error or not outcome.successful:
        return "failed"
    return "some failed" if outcome.failed or outcome.missing else "succeeded"
