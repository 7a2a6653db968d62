"""Finds staged runs.  Read-only, prints nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from airflow_broadway.core.errors import RequestRefused, StagingDamaged
from airflow_broadway.core.formats import paths
from airflow_broadway.runs.account import REPORT, kept_report, summarize_trouble
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.names import encode_name, readable_name
from airflow_broadway.staging.retention import KEEP, balanced_runs
from airflow_broadway.staging.run_folder import (
    OPENED,
    PUBLISHED,
    SETTLED,
    SETTLING,
    StagedRun,
    generations_in,
)
from airflow_broadway.staging.store import Folder, Store

#: The states of a generation, in order.
_STATES: Final = (OPENED, PUBLISHED, SETTLING, SETTLED)


# -- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A staged run in one row.

    Counts are messages.  Without a report only ``received`` is known, from the manifests; the other
    counts are ``None``.

    :param balanced: Whether each received message is in exactly one class; ``None`` without a
        report.
    :param trouble: The problem that needs attention, as a sentence; empty if there is none.
    :param state: ``"open"``, ``"published"``, ``"settling"``, ``"settled"``: the earliest state
        among its generations.
    :param opened_at: Start time as ISO 8601 text; empty if it never received.
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


# -- runs ------------------------------------------------------------------------------------------


def iter_runs(
    store: Store,
    *,
    dag_id: str | None = None,
    run_id: str | None = None,
    pipeline: str | None = None,
) -> Iterator[StagedRun]:
    """Yields the staged runs in the order of their folders.

    :raises StagingError: If the root cannot be read.
    """
    for dag in _dag_folders(store, dag_id, pipeline):
        run_folders = _folders(store, dag.path) if run_id is None else [encode_name(run_id)]
        for run_folder in run_folders:
            run = _identify_run(store, store.folder(f"{dag.path}/{run_folder}"))
            if run is not None:
                yield run


def _dag_folders(store: Store, dag_id: str | None, pipeline: str | None) -> Iterator[Folder]:
    for name in _folders(store, "") if pipeline is None else [encode_name(pipeline)]:
        for dag in _folders(store, name) if dag_id is None else [encode_name(dag_id)]:
            yield store.folder(f"{name}/{dag}")


def check_pipeline(store: Store, name: str) -> None:
    """Rejects a pipeline name without staged or archived runs, which is probably a typo.

    :raises RequestRefused: If there are none; names the existing pipelines.
    """
    known_folders = _folders(store, "")
    if encode_name(name) not in known_folders:
        names = ", ".join(map(readable_name, known_folders)) or "none"
        raise RequestRefused(
            f"no run of a pipeline {name!r} has staged or archived anything under {store.uri};"
            f" pipelines there: {names}"
        )


def _folders(store: Store, path: str) -> list[str]:
    """Lists the folders of pipelines, Dags or runs below ``path``.

    Names that begin with ``_`` or ``.`` are internal and left out.
    """
    full = f"{store.root}/{path}".rstrip("/")
    with translated(f"list {path or 'the runs'}", store.uri):
        names = store.backend.list(full)
    return [
        name
        for name in names
        if name[0] not in "._" and not (store.local and not Path(full, name).is_dir())
    ]


def _identify_run(store: Store, folder: Folder) -> StagedRun | None:
    """Reads a run's ids from its files, since a folder name holds a long id truncated."""
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
    return None  # not a run, or removed since the listing


def find_run(store: Store, dag_id: str, run_id: str, pipeline: str | None = None) -> StagedRun:
    """Returns the only run with these ids.

    :param pipeline: Name of the pipeline; needed if several staged a run with these ids.
    :raises RequestRefused: If no run matches, or several do.
    """
    runs = list(iter_runs(store, dag_id=dag_id, run_id=run_id, pipeline=pipeline))
    if len(runs) == 1:
        return runs[0]
    if runs:
        names = [run.pipeline for run in runs]
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
    store: Store,
    *,
    dag_id: str | None = None,
    pipeline: str | None = None,
    newest: int | None = None,
) -> tuple[list[RunSummary], int]:
    """Lists the staged runs, oldest first, and counts all of them.

    :param newest: The number of runs to read, which are those that balanced last, and those that
        have not balanced; ``None`` for all.
    """
    folders = [
        (folder, name)
        for folder in _dag_folders(store, dag_id, pipeline)
        for name in _folders(store, folder.path)
    ]
    marks: dict[tuple[str, str], str] = {}
    if newest is not None:
        for folder in {folder.path: folder for folder, _ in folders}.values():
            marks |= {(folder.path, run): at for run, at in balanced_runs(folder).items()}
    by_time = sorted(folders, key=lambda pair: marks.get((pair[0].path, pair[1]), "~"))
    runs = (
        _identify_run(store, store.folder(f"{folder.path}/{name}"))
        for folder, name in by_time[-newest if newest else 0 :]
    )
    summaries = (summary_of(run) for run in runs if run is not None)
    return sorted(summaries, key=lambda row: (row.opened_at, row.dag_id, row.run_id)), len(folders)


def summary_of(run: StagedRun) -> RunSummary:
    """Summarizes a run in one row."""
    records = run.generations()
    report = kept_report(run)
    # The report is the only file of an empty run.
    nothing = (SETTLED, report["at"]) if report is not None else (OPENED, "")
    totals = {} if report is None else report["totals"]
    received = totals.get("received")
    if report is None:
        manifests = (run.manifest(record.generation) for record in records)
        received = sum(manifest.received for manifest in manifests if manifest is not None)
    return RunSummary(
        dag_id=run.dag_id,
        run_id=run.run_id,
        pipeline=run.pipeline,
        received=received,
        acked=totals.get("acked"),
        dead_lettered=totals.get("dead_lettered"),
        failed=totals.get("failed"),
        balanced=None if report is None else report["balanced"],
        trouble="" if report is None else summarize_trouble(report),
        state=min((record.state for record in records), key=_STATES.index, default=nothing[0]),
        opened_at=min((record.opened_at for record in records), default=nothing[1]),
    )
