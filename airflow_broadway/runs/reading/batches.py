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

#: Files that are read of one plan's outcomes; one may hold copies of a thousand.
MOST_FILES: Final = 1000
#: Outcomes that are read to order batches by what became of them, ...
MOST_SORTED: Final = 50_000
#: ... and to count what a run that goes on has come to.
MOST_OUTCOMES: Final = 1000

#: What batches can be sorted by: the plan's own facts, ...
_BY_PLAN: Final[dict[str, Callable[[PlannedBatch], Any]]] = {
    "key": lambda batch: json.dumps(batch.batch_key, sort_keys=True),
    "messages": lambda batch: batch.size,
    "trigger": lambda batch: batch.trigger,
}
#: ... and what their outcomes say.
_BY_OUTCOME: Final[dict[str, Callable[[Outcome], Any]]] = {
    "attempts": lambda outcome: outcome.try_number,
    "seconds": lambda outcome: outcome.seconds,
    "started": lambda outcome: outcome.started_at,
    "failed": lambda outcome: outcome.failed + outcome.missing,
    "reason": lambda outcome: outcome.error,
}
#: ``plan`` is the order of the plans: by batcher, then as the batches were closed.
SORTS: Final = ("plan", *_BY_PLAN, *_BY_OUTCOME)

#: Which batches are shown: all, those that no outcome is recorded of, and those with failures.
STATES: Final = ("all", "open", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A batch in the table.

    :param key: The key, as JSON unless it is text; empty for a merged batch.
    :param keys: How many keys it carries.
    :param part: Whether it is a part of a batch that was split, since processes died of it.
    :param outcome: What became of it: ``succeeded``, ``failed`` (all of it, or some), ``crashed``
        (set aside), or ``""`` while nothing is recorded.
    :param attempt: The try of its task that handled it.
    :param reason: What failed the whole batch.
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

    :param total: Batches in all, of the state asked for.
    :param page: Which page it is, from 1; ``pages`` are there.
    :param sort: What it is sorted by; not what was asked for where ``too_many`` says so.
    :param too_many: Whether there are too many outcomes to sort or choose by them.
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
    """Read the outcomes of plans if they are few; whether they are read."""
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
    """A page of a run's batches; what is asked for and is not there becomes what is.

    :param sort: One of :data:`SORTS`; batches without what it goes by come last.
    :param state: One of :data:`STATES`.
    :param batcher: Only this one's; empty: all.
    :raises StagingError: If files cannot be read.
    """
    recorded = recorded or Recorded(run)
    sort, state = sort if sort in SORTS else "plan", state if state in STATES else "all"
    batchers = run.files.list("batches")
    chosen = [each for each in batchers if batcher in ("", each)]
    plans = [plan for each in chosen for plan in recorded.standing(each)]
    places = list(_distinct(recorded, plans))
    wants_outcomes = sort in _BY_OUTCOME or state == "failed"
    too_many = wants_outcomes and not reads_ahead(recorded, plans, MOST_SORTED)
    if too_many:
        sort = "plan" if sort in _BY_OUTCOME else sort
        state = "all" if state == "failed" else state
    places = [each for each in places if _is_in(recorded, each, state)]
    places = _ordered(recorded, places, sort, descending=descending)
    pages = max(1, -(-len(places) // PAGE))
    page = min(max(1, page), pages)
    shown = places[(page - 1) * PAGE : page * PAGE]
    return BatchPage(
        rows=_rows(recorded, shown),
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


def _distinct(recorded: Recorded, plans: Iterable[BatchPlan]) -> Iterable[_Place]:
    """The batches of plans in order, each once: a later plan may have the same."""
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


def _ordered(
    recorded: Recorded, places: list[_Place], sort: str, *, descending: bool
) -> list[_Place]:
    if sort in _BY_PLAN:
        by_plan = _BY_PLAN[sort]
        return sorted(places, key=lambda place: by_plan(place.batch), reverse=descending)
    if sort in _BY_OUTCOME:
        by_outcome = _BY_OUTCOME[sort]
        with_one = [each for each in places if each.batch.batch_id in recorded.ids(each.plan)]
        without = [each for each in places if each.batch.batch_id not in recorded.ids(each.plan)]
        with_one.sort(
            key=lambda place: by_outcome(_outcome_of(recorded, place)), reverse=descending
        )
        return with_one + without
    return places[::-1] if descending else places


def _rows(recorded: Recorded, shown: Sequence[_Place]) -> list[BatchRow]:
    by_plan: dict[str, list[_Place]] = {}
    for place in shown:
        by_plan.setdefault(place.plan.path, []).append(place)
    found: dict[tuple[str, str], Outcome] = {}
    for path, places in by_plan.items():
        outcomes = recorded.outcomes_of(places[0].plan, [each.batch for each in places])
        found |= {(path, batch_id): outcome for batch_id, outcome in outcomes.items()}
    return [_row(each, found.get((each.plan.path, each.batch.batch_id))) for each in shown]


def _row(place: _Place, outcome: Outcome | None) -> BatchRow:
    batch = place.batch
    about: dict[str, Any] = {
        "batcher": place.plan.batcher,
        "batch_id": batch.batch_id,
        "key": _key_text(batch),
        "keys": batch.keys,
        "messages": batch.size,
        "trigger": batch.trigger,
        "redelivered": batch.redelivered,
        "part": batch.part is not None,
    }
    if outcome is None:
        return BatchRow(**about, outcome="")
    return BatchRow(
        **about,
        outcome=_word_for(outcome),
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


def _key_text(batch: PlannedBatch) -> str:
    if batch.keys > 1:
        return ""
    key = batch.batch_key
    return key if isinstance(key, str) else json.dumps(key, ensure_ascii=False)


def _word_for(outcome: Outcome) -> str:
    if outcome.error.startswith(CRASHED):
        return "crashed"
    if outcome.error or not outcome.successful:
        return "failed"
    return "some failed" if outcome.failed or outcome.missing else "succeeded"
