"""Finds staged runs, and their batches.  Nothing here prints, or changes a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from airflow_broadway.core.errors import RequestRefused, StagingDamaged
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.outcome import Outcome
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.runs.account import REPORT, kept_report, summarize_trouble
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.names import encode_name, readable_name
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.retention import KEEP
from airflow_broadway.staging.run_folder import (
    OPENED,
    PUBLISHED,
    SETTLED,
    SETTLING,
    StagedRun,
    generations_in,
)
from airflow_broadway.staging.store import Folder, Store

#: What a generation comes to, in order.
_STATES: Final = (OPENED, PUBLISHED, SETTLING, SETTLED)


# -- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A staged run on one line.

    Counts are messages; those of a run without a report are ``None``, except what its manifests say
    was received.

    :param balanced: Whether each message received is in exactly one class; ``None`` without a
        report.
    :param trouble: Why people should look at it, as a sentence; empty if nothing is wrong.
    :param state: ``"open"``, ``"published"``, ``"settling"``, ``"settled"``: that of its generation
        which is least far.
    :param opened_at: When it began, as ISO 8601 text; empty if it never received.
    """

    dag_id: str
    run_id: str
    pipeline: str
    received: int | None = None
    acked: int | None = None
    dead_lettered: int | None = None
    failed: int | None = None
    balanced: bool | None = None
    trouble: str = ""
    state: str
    opened_at: str


class StagedBatch(NamedTuple):
    """A batch of a run; without an outcome it was never handled, or not to its end."""

    plan: BatchPlan
    planned: PlannedBatch
    outcome: Outcome | None


# -- runs ------------------------------------------------------------------------------------------


def iter_runs(
    store: Store,
    *,
    dag_id: str | None = None,
    run_id: str | None = None,
    pipeline: str | None = None,
) -> Iterator[StagedRun]:
    """The staged runs, in order of their folders.

    :raises StagingError: If the root cannot be read.
    """
    names = _folders(store, "") if pipeline is None else [encode_name(pipeline)]
    for name in names:
        dags = _folders(store, name) if dag_id is None else [encode_name(dag_id)]
        for dag in dags:
            path = f"{name}/{dag}"
            found = _folders(store, path) if run_id is None else [encode_name(run_id)]
            for each in found:
                run = _identified(store, store.folder(f"{path}/{each}"))
                if run is not None:
                    yield run


def check_pipeline(store: Store, name: str) -> None:
    """Refuse a pipeline's name of which nothing is staged or archived: a mistyped one looks empty.

    :raises RequestRefused: Naming the pipelines that there are.
    """
    known = _folders(store, "")
    if encode_name(name) not in known:
        names = ", ".join(map(readable_name, known)) or "none"
        raise RequestRefused(
            f"no run of a pipeline {name!r} has staged or archived anything under {store.uri};"
            f" pipelines there: {names}"
        )


def _folders(store: Store, path: str) -> list[str]:
    """The folders of pipelines, Dags and runs below ``path``; ours begin with ``_`` or ``.``."""
    full = f"{store.root}/{path}".rstrip("/")
    with translated(f"list {path or 'the runs'}", store.uri):
        names = store.backend.list(full)
    return [
        name
        for name in names
        if name[0] not in "._" and not (store.local and not Path(full, name).is_dir())
    ]


def _identified(store: Store, folder: Folder) -> StagedRun | None:
    """The run of a folder, by the ids that its files give: a long id is not whole in its name."""
    opened = generations_in(folder.list(paths.GENERATIONS))
    for path in (*map(paths.generation, opened[:1]), REPORT):
        try:
            value = json.loads(folder.read(path))
            return StagedRun(
                store, pipeline=value["pipeline"], dag_id=value["dag_id"], run_id=value["run_id"]
            )
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise StagingDamaged(f"{folder.path}/{path} is damaged ({error!r})") from error
    return None  # no run, or removed since


def find_run(store: Store, dag_id: str, run_id: str, pipeline: str | None = None) -> StagedRun:
    """The one run of these ids.

    :param pipeline: Which pipeline's, if several staged a run of these ids.
    :raises RequestRefused: If there is none, or several.
    """
    found = list(iter_runs(store, dag_id=dag_id, run_id=run_id, pipeline=pipeline))
    if len(found) == 1:
        return found[0]
    if found:
        names = [each.pipeline for each in found]
        raise RequestRefused(
            f"the pipelines {names} all staged a run {run_id!r} of the Dag {dag_id!r}: choose one"
            " with --pipeline-name"
        )
    of = "" if pipeline is None else f" of the pipeline {pipeline!r}"
    raise RequestRefused(
        f"there is no staged run {run_id!r} of the Dag {dag_id!r}{of} under {store.uri}: it never"
        f" received anything, or retention removed it ({KEEP / 86_400:g} days after it balanced);"
        f" `airflow-broadway runs --dag-id {dag_id}` lists what is there"
    )


def list_runs(
    store: Store, *, dag_id: str | None = None, pipeline: str | None = None
) -> list[RunSummary]:
    """The staged runs, oldest first."""
    found = [summary_of(run) for run in iter_runs(store, dag_id=dag_id, pipeline=pipeline)]
    return sorted(found, key=lambda each: (each.opened_at, each.dag_id, each.run_id))


def summary_of(run: StagedRun) -> RunSummary:
    """A run on one line."""
    ids: dict[str, Any] = {"dag_id": run.dag_id, "run_id": run.run_id, "pipeline": run.pipeline}
    records = run.generations()
    report = kept_report(run)
    # An empty run leaves its report alone.
    nothing = (SETTLED, report["at"]) if report is not None else (OPENED, "")
    state = min((each.state for each in records), key=_STATES.index, default=nothing[0])
    opened_at = min((each.opened_at for each in records), default=nothing[1])
    if report is None:
        manifests = (run.manifest(each.generation) for each in records)
        received = sum(each.received for each in manifests if each is not None)
        return RunSummary(**ids, received=received, state=state, opened_at=opened_at)
    totals = report["totals"]
    return RunSummary(
        **ids,
        received=totals.get("received"),
        acked=totals.get("acked"),
        dead_lettered=totals.get("dead_lettered"),
        failed=totals.get("failed"),
        balanced=report["balanced"],
        trouble=summarize_trouble(report),
        state=state,
        opened_at=opened_at,
    )


def staged_batches(run: StagedRun) -> Iterator[StagedBatch]:
    """The batches of a run, by batcher, in the order of their plans."""
    recorded = Recorded(run)
    for batcher in run.files.list("batches"):
        seen: set[str] = set()
        for plan in recorded.standing(batcher):
            for planned, outcome in recorded.outcomes(plan):
                if planned.batch_id not in seen:
                    seen.add(planned.batch_id)
                    yield StagedBatch(plan, planned, outcome)
