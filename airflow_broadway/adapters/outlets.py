"""The outlets of tasks that handle batches: their assets, and what their events say."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset

from airflow_broadway.core.errors import OptionsError

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context

    from airflow_broadway.core.formats.plan import BatchPlan
    from airflow_broadway.core.pipeline import Pipeline
    from airflow_broadway.staging.run_folder import StagedRun


log = logging.getLogger(__name__)


def outlets_of(pipeline: Pipeline, batchers: Iterable[str]) -> list[Asset]:
    """The assets that some batchers declare as their outlets."""
    names = (name for batcher in batchers for name in pipeline.batchers[batcher].outlets)
    return [Asset(name) for name in dict.fromkeys(names)]


def with_outlets(
    given: Mapping[str, Any], pipeline: Pipeline, batchers: Iterable[str]
) -> dict[str, Any]:
    """A task's arguments, with those outlets beside its own."""
    declared = outlets_of(pipeline, batchers)
    if not declared:
        return dict(given)
    own = given.get("outlets") or []
    return {**given, "outlets": [*(own if isinstance(own, list) else [own]), *declared]}


def check_no_outlets(pipeline: Pipeline) -> None:
    """Refuse outlets of batchers where nothing is staged that an event could tell of.

    :raises OptionsError: Naming the first batcher that has some.
    """
    for name, batcher in pipeline.batchers.items():
        if batcher.outlets:
            raise OptionsError(
                f"batchers.{name}.outlets",
                "none with BroadwayRunOperator, which stages nothing and so knows no batch ids:"
                " give the operator outlets=[Asset(…)], or use a task group",
                batcher.outlets,
            )


def tell_outlets(
    operator: BaseOperator,
    context: Context,
    run: StagedRun,
    pipeline: Pipeline,
    heads: Iterable[BatchPlan],
) -> None:
    """Say in the event of each outlet what the batches came to.

    An outlet of batchers of which no message succeeded gets no event: it was not changed.  One that
    the task was given, and no batcher declares, is that of all its batches.
    """
    from airflow_broadway.runs.outlets import Produced, produced

    heads = list(heads)
    declared: dict[str, set[str]] = {}  # outlet → which of the batchers here declare it
    for head in heads:
        for name in pipeline.batchers[head.batcher].outlets:
            declared.setdefault(name, set()).add(head.batcher)
    missing = sorted(declared.keys() - {getattr(each, "name", "") for each in operator.outlets})
    if missing:
        log.warning(
            "The outlets %s are declared by batchers, and not this task's: no event tells of them."
            "  Give them to the operator: outlets=[Asset(%r), …]",
            missing,
            missing[0],
        )
    if not operator.outlets:
        return
    by_batcher = produced(run, heads)
    others = {name for batcher in pipeline.batchers.values() for name in batcher.outlets}
    kept = []
    for outlet in operator.outlets:
        if not isinstance(outlet, Asset):  # an alias, whose events are the user's own
            kept.append(outlet)
            continue
        total = Produced()
        for batcher, found in by_batcher.items():
            if outlet.name not in others or batcher in declared.get(outlet.name, ()):
                total.add(found)
        if total.successful:
            kept.append(outlet)
            context["outlet_events"][outlet].extra.update(total.extra(pipeline.name))
    operator.outlets = kept
