"""``airflow-broadway runs`` and ``show``: what lies in a staging root."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from airflow_broadway.cli.output import CommandError, cut, say, say_json, table
from airflow_broadway.core.custody.report import handled_of
from airflow_broadway.core.custody.run_summary import failures_trouble, lines_of, settling_trouble
from airflow_broadway.core.errors import StagingDamaged, StagingError
from airflow_broadway.core.formats.layout import paths
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.text import many
from airflow_broadway.operators._common import open_store, staging_root
from airflow_broadway.runs.account import REPORT
from airflow_broadway.runs.replay_folder import MARK, StagedBatch, staged_batches
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.retention import KEEP, remove_run
from airflow_broadway.staging.run_folder import (
    OPENED,
    PUBLISHED,
    SETTLED,
    SETTLING,
    StagedRun,
    generations_in,
)
from airflow_broadway.staging.settlement_journal import settled_journal
from airflow_broadway.staging.store import Folder, Store

__all__ = ["find_run", "iter_runs", "open_root", "remove", "runs", "show"]

#: Batches that a table shows; JSON has all.
SHOWN = 50
#: Runs that a table shows unless told; JSON has all.
NEWEST = 50

_STATES = (OPENED, PUBLISHED, SETTLING, SETTLED)


def open_root(staging: str | None) -> Store:
    """The staging root to look at.

    :raises StagingError: If it cannot be opened, or is a folder that does not exist.
    """
    try:
        store = open_store(staging)
    except (ImportError, ValueError) as error:
        raise StagingError(
            f"cannot open the staging root {staging_root(staging)}: {error}"
        ) from error
    if store.local and not Path(store.root).is_dir():
        raise StagingError(
            f"the staging folder {store.uri} does not exist: give --staging, or set"
            " `[broadway] staging`"
        )
    return store


def iter_runs(
    store: Store,
    *,
    dag_id: str | None = None,
    run_id: str | None = None,
    pipeline: str | None = None,
) -> Iterator[StagedRun]:
    """The staged runs, replays among them, in order of their folders."""
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
    for path in (*map(paths.generation, opened[:1]), MARK, REPORT):
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

    :raises CommandError: If there is none, or if several pipelines have one.
    """
    found = list(iter_runs(store, dag_id=dag_id, run_id=run_id, pipeline=pipeline))
    if len(found) == 1:
        return found[0]
    if found:
        names = [each.pipeline for each in found]
        raise CommandError(
            f"the pipelines {names} all staged a run {run_id!r} of the Dag {dag_id!r}: choose one"
            " with --pipeline-name"
        )
    of = "" if pipeline is None else f" of the pipeline {pipeline!r}"
    raise CommandError(
        f"there is no staged run {run_id!r} of the Dag {dag_id!r}{of} under {store.uri}: it never"
        f" received anything, or retention removed it ({KEEP / 86_400:g} days after it balanced);"
        f" `airflow-broadway runs --dag-id {dag_id}` lists what is there"
    )


# --------------------------------------------------------------------------------------------------


def runs(given: argparse.Namespace) -> int:
    """List the staged runs, oldest first."""
    if given.limit is not None and given.limit < 1:
        raise CommandError(f"--limit is to be at least 1, not {given.limit}")
    store = open_root(given.staging)
    found = [
        _summary(run) for run in iter_runs(store, dag_id=given.dag_id, pipeline=given.pipeline_name)
    ]
    if given.failed:
        found = [each for each in found if each["trouble"]]
    found.sort(key=lambda each: (each["opened_at"], each["dag_id"], each["run_id"]))
    total = len(found)
    found = found[-(given.limit or (total if given.json else NEWEST)) :]
    if given.json:
        say_json(found)
        return 0
    if not found:
        what = "runs that need looking at" if given.failed else "staged runs"
        of = f" of the Dag {given.dag_id!r}" if given.dag_id else ""
        say(f"No {what}{of} under {store.uri}.")
        return 0
    rows = (
        (
            each["opened_at"][:19].replace("T", " ") or None,
            each["dag_id"],
            each["run_id"],
            each["pipeline"],
            each["received"],
            each["acked"],
            each["dead_lettered"],
            each["failed"],
            each["state"],
            {None: None, True: "yes", False: "NO"}[each["balanced"]],
        )
        for each in found
    )
    heads = ("time", "dag", "run", "pipeline", "received", "acked", "dead", "failed", "state")
    say(*table((*heads, "balanced"), rows))
    if len(found) < total:
        say(f"These are the {len(found)} newest of {total}: --limit {total} shows all.")
    for each in found if given.failed else ():
        say(f"{each['run_id']}: {each['trouble']}")
    return 0


def _summary(run: StagedRun) -> dict[str, Any]:
    about: dict[str, Any] = {
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "pipeline": run.pipeline,
        "received": None,
        "acked": None,
        "dead_lettered": None,
        "failed": None,
        "balanced": None,
        "trouble": "",
        "replay_of": None,
    }
    mark = _read(run, MARK)
    if mark is not None:
        opened = {"opened_at": mark["started_at"], "replay_of": mark["of"]}
        return {**about, "state": "replay", **opened}
    records = run.generations()
    report = _read(run, REPORT)
    if report is not None:
        about |= {name: report["totals"].get(name) for name in about if name in report["totals"]}
        about |= {"balanced": report["balanced"], "trouble": _trouble(report)}
    else:
        manifests = (run.manifest(each.generation) for each in records)
        about["received"] = sum(each.received for each in manifests if each is not None)
    # An empty run leaves its report alone.
    nothing = (SETTLED, report["at"]) if report is not None else (OPENED, "")
    return {
        **about,
        "state": min((each.state for each in records), key=_STATES.index, default=nothing[0]),
        "opened_at": min((each.opened_at for each in records), default=nothing[1]),
    }


def _trouble(report: dict[str, Any]) -> str:
    """Why a run needs looking at; empty if it does not."""
    totals = report["totals"]
    found = [
        "" if report["balanced"] else "the sum does not balance",
        f"tasks failed: {report['failed_tasks']}" if report.get("failed_tasks") else "",
        settling_trouble(totals["lapsed"], totals["settle_failed"]),
        failures_trouble(totals["failed"], handled_of(totals), "all"),
    ]
    return "; ".join(each for each in found if each)


def remove(given: argparse.Namespace) -> int:
    """Remove the files of a run that somebody has looked at."""
    store = open_root(given.staging)
    run = find_run(store, given.dag_id, given.run_id, given.pipeline_name)
    held = [each for each in run.generations() if each.state != SETTLED]
    if held:
        raise CommandError(
            f"run {run.run_id!r} of the Dag {run.dag_id!r} has"
            f" {many(len(held), 'generation')} that nobody has settled"
            f" ({', '.join(each.generation for each in held)}): clear its `ack` task, or let the"
            " next run give these messages back, and remove it then"
        )
    remove_run(run)
    if given.json:
        say_json({"dag_id": run.dag_id, "run_id": run.run_id, "removed": True})
    else:
        say(f"Removed the files of run {run.run_id} of the Dag {run.dag_id}.")
    return 0


def _read(run: StagedRun, path: str) -> dict[str, Any] | None:
    try:
        value: dict[str, Any] = json.loads(run.files.read(path))
    except FileNotFoundError:
        return None
    return value


# --------------------------------------------------------------------------------------------------


def show(given: argparse.Namespace) -> int:
    """Show one run."""
    store = open_root(given.staging)
    run = find_run(store, given.dag_id, given.run_id, given.pipeline_name)
    summary = _summary(run)
    generations = [_generation(run, record.generation) for record in run.generations()]
    batches = [_batch(each) for each in staged_batches(run)]
    report = _read(run, REPORT)
    if given.json:
        about = {**summary, "path": f"{store.uri}/{run.path}"}
        say_json({**about, "generations": generations, "batches": batches, "report": report})
        return 0
    say(
        f"Run {run.run_id} of the Dag {run.dag_id}, pipeline {run.pipeline}: {summary['state']}.",
        f"Files: {store.uri}/{run.path}",
    )
    if summary["replay_of"]:
        say(f"A replay of {summary['replay_of']}.")
    if generations:
        say("", *_generation_table(generations))
    if batches:
        say("", *_batch_table(batches))
    if report is not None:
        say("", *_report_lines(report))
    return 0


def _generation(run: StagedRun, generation: str) -> dict[str, Any]:
    record = run.generation(generation)
    manifest: Manifest | None = run.manifest(generation)
    journal = settled_journal(run, generation)
    return {
        "generation": generation,
        "task_id": record.task_id,
        "map_index": record.map_index,
        "try_number": record.try_number,
        "opened_at": record.opened_at,
        "state": record.state,
        "received": None if manifest is None else manifest.received,
        "failed": None if manifest is None else manifest.failed,
        "batchers": {} if manifest is None else manifest.batchers,
        "settled_at": None if journal is None else journal.at,
        "settled": None if journal is None else (journal.report + journal.settled_now).to_json(),
    }


def _generation_table(generations: list[dict[str, Any]]) -> list[str]:
    rows = []
    for each in generations:
        index = "" if each["map_index"] < 0 else f"[{each['map_index']}]"
        counts = (each["settled"] or {}).items()
        settled = ", ".join(f"{name} {n}" for name, n in counts if isinstance(n, int) and n)
        rows.append(
            (
                each["generation"],
                f"{each['task_id']}{index}",
                each["try_number"],
                each["state"],
                each["received"],
                each["failed"],
                settled or None,
            )
        )
    return table(("generation", "task", "try", "state", "received", "failed", "settled"), rows)


def _batch(staged: StagedBatch) -> dict[str, Any]:
    planned, outcome = staged.planned, staged.outcome
    return {
        "batcher": staged.plan.batcher,
        "batch_id": planned.batch_id,
        "batch_key": planned.batch_key,
        "size": planned.size,
        "trigger": planned.trigger,
        "redelivered": planned.redelivered,
        "outcome": None
        if outcome is None
        else {
            "successful": outcome.successful,
            "failed": outcome.failed,
            "missing": outcome.missing,
            "error": outcome.error,
            "writer": outcome.writer,
            "started_at": outcome.started_at,
            "seconds": outcome.seconds,
        },
    }


def _batch_table(batches: list[dict[str, Any]]) -> list[str]:
    rows = []
    for each in batches[:SHOWN]:
        outcome = each["outcome"] or {}
        rows.append(
            (
                each["batcher"],
                each["batch_id"],
                cut(json.dumps(each["batch_key"]), 30),
                each["size"],
                each["trigger"],
                outcome.get("successful"),
                outcome.get("failed"),
                cut(outcome.get("error") or "") or None,
            )
        )
    heads = ("batcher", "batch", "key", "size", "trigger", "succeeded", "failed", "error")
    lines = table(heads, rows)
    if len(batches) > SHOWN:
        lines.append(f"These are {SHOWN} of {len(batches)}: --json has all.")
    return lines


def _report_lines(report: dict[str, Any]) -> list[str]:
    balanced = "balanced" if report["balanced"] else "NOT BALANCED"
    return [f"Report of {report['at']}: {balanced}.", *lines_of(report)]
