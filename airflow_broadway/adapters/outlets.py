"""The asset outlets of tasks that handle batches, and the content of their events."""

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
    """Returns the assets that some batchers update."""
    names = (name for batcher in batchers for name in pipeline.batchers[batcher].assets)
    return [Asset(name) for name in dict.fromkeys(names)]


def with_outlets(
    kwargs: Mapping[str, Any], pipeline: Pipeline, batchers: Iterable[str]
) -> dict[str, Any]:
    """Returns a task's arguments, with the batchers' outlets added to its own."""
    declared = outlets_of(pipeline, batchers)
    if not declared:
        return dict(kwargs)
    own = kwargs.get("outlets") or []
    return {**kwargs, "outlets": [*(own if isinstance(own, list) else [own]), *declared]}


def check_no_outlets(pipeline: Pipeline) -> None:
    """Refuses outlets of batchers where nothing is staged that an event could describe.

    :raises OptionsError: Naming the first batcher with outlets.
    """
    for name, batcher in pipeline.batchers.items():
        if batcher.outlets:
            raise OptionsError(
                f"batchers.{name}.outlets",
                "none with BroadwayRunOperator, which stages nothing and so knows no batch ids:"
                " set the operator's outlets=[Asset(…)], or use a task group",
                batcher.outlets,
            )


def emit_outlet_events(
    operator: BaseOperator,
    context: Context,
    run: StagedRun,
    pipeline: Pipeline,
    heads: Iterable[BatchPlan],
) -> None:
    """Fills the event of each outlet with the counts of its batches.

    An outlet of batchers without a successful message gets no event: it was not updated.  An outlet
    of the task that no batcher declares counts all of the task's batches.
    """
    from airflow_broadway.runs.outcomes import event_extra, successful_outcomes

    heads = list(heads)
    declared: dict[str, set[str]] = {}  # outlet → the batchers of this task that declare it
    for head in heads:
        for name in pipeline.batchers[head.batcher].assets:
            declared.setdefault(name, set()).add(head.batcher)
    promised = {name for head in heads for name in pipeline.batchers[head.batcher].outlets or ()}
    missing = sorted(promised - {getattr(asset, "name", "") for asset in operator.outlets})
    if missing:
        log.warning(
            "The outlets %s are declared by batchers, but are not this task's: they get no event."
            "  Add them to the operator: outlets=[Asset(%r), …]",
            missing,
            missing[0],
        )
    if not operator.outlets:
        return
    by_batcher = successful_outcomes(run, heads)
    others = {name for batcher in pipeline.batchers.values() for name in batcher.assets}
    updated = []
    for outlet in operator.outlets:
        if not isinstance(outlet, Asset):  # an alias, whose events are the user's own
            updated.append(outlet)
            continue
        outcomes = [
            outcome
            for batcher, of_batcher in by_batcher.items()
            if outlet.name not in others or batcher in declared.get(outlet.name, ())
            for outcome in of_batcher
        ]
        if outcomes:
            updated.append(outlet)
            context["outlet_events"][outlet].extra.update(event_extra(pipeline.name, outcomes))
    operator.outlets = updated
