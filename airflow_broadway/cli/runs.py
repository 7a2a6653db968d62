"""``airflow-broadway runs``, ``show`` and ``remove``: what lies in a staging root."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.cli.output import CommandError, cut, say, say_json
from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import table
from airflow_broadway.runs.account import kept_report
from airflow_broadway.runs.reading.overview import Receipt, overview_of
from airflow_broadway.runs.reading.runs import (
    RunSummary,
    StagedBatch,
    check_pipeline,
    find_run,
    list_runs,
    staged_batches,
)
from airflow_broadway.runs.sweep import remove_settled_run

#: Batches that a table shows; JSON has all.
SHOWN = 50
#: Runs that a table shows unless --limit says otherwise; JSON has all.
NEWEST = 50


def runs(given: argparse.Namespace) -> int:
    """List the staged runs, oldest first."""
    if given.limit is not None and given.limit < 1:
        raise CommandError(f"--limit is to be at least 1, not {given.limit}")
    store = open_existing_store(given.staging)
    if given.pipeline_name is not None:
        check_pipeline(store, given.pipeline_name)
    found = list_runs(store, dag_id=given.dag_id, pipeline=given.pipeline_name)
    if given.failed:
        found = [summary for summary in found if summary.trouble]
    total = len(found)
    found = found[-(given.limit or (total if given.json else NEWEST)) :]
    if given.json:
        say_json([asdict(summary) for summary in found])
        return 0
    if not found:
        what = "runs that need looking at" if given.failed else "staged runs"
        of = f" of the Dag {given.dag_id!r}" if given.dag_id else ""
        say(f"No {what}{of} under {redacted(store.uri)}.")
        return 0
    say(*_run_table(found))
    if len(found) < total:
        say(f"These are the {len(found)} newest of {total}: --limit {total} shows all.")
    for summary in found if given.failed else ():
        say(f"{summary.run_id}: {summary.trouble}")
    return 0


def _run_table(found: Sequence[RunSummary]) -> list[str]:
    rows = (
        (
            summary.opened_at[:19].replace("T", " ") or None,
            summary.dag_id,
            summary.run_id,
            summary.pipeline,
            summary.received,
            summary.acked,
            summary.dead_lettered,
            summary.failed,
            summary.state,
            {None: None, True: "yes", False: "NO"}[summary.balanced],
        )
        for summary in found
    )
    heads = ("time", "dag", "run", "pipeline", "received", "acked", "dead", "failed", "state")
    return table((*heads, "balanced"), rows)


def remove(given: argparse.Namespace) -> int:
    """Remove the files of a run that somebody has looked at."""
    store = open_existing_store(given.staging)
    run = find_run(store, given.dag_id, given.run_id, given.pipeline_name)
    if not given.yes:
        raise CommandError(
            f"nothing was removed: use --yes to remove the files of run {run.run_id} of the Dag"
            f" {run.dag_id} for good"
        )
    remove_settled_run(run)
    if given.json:
        say_json({"dag_id": run.dag_id, "run_id": run.run_id, "removed": True})
    else:
        say(f"Removed the files of run {run.run_id} of the Dag {run.dag_id}.")
    return 0


def show(given: argparse.Namespace) -> int:
    """Prints one run: its generations, its batches and its report."""
    store = open_existing_store(given.staging)
    run = find_run(store, given.dag_id, given.run_id, given.pipeline_name)
    overview, batches, report = overview_of(run), list(staged_batches(run)), kept_report(run)
    summary = overview.summary
    if given.json:
        say_json(
            {
                **asdict(summary),
                "path": overview.path,
                "generations": [asdict(receipt) for receipt in overview.receipts],
                "batches": [_batch_json(batch) for batch in batches],
                "report": report,
            }
        )
        return 0
    say(
        f"Run {run.run_id} of the Dag {run.dag_id}, pipeline {run.pipeline}: {summary.state}.",
        f"Files: {overview.path}",
    )
    if overview.receipts:
        say("", *_generation_table(overview.receipts))
    if batches:
        say("", *_batch_table(batches))
    if report is not None:
        say("", *_report_lines(report))
    return 0


def _generation_table(receipts: Sequence[Receipt]) -> list[str]:
    rows = []
    for receipt in receipts:
        counts = receipt.account or {}
        settled = ", ".join(f"{name} {counts[name]}" for name in CLASSES if counts.get(name))
        rows.append(
            (
                receipt.generation,
                receipt.task,
                receipt.try_number,
                receipt.state,
                receipt.received,
                receipt.failed,
                settled if receipt.lease is None else None,
            )
        )
    return table(("generation", "task", "try", "state", "received", "failed", "settled"), rows)


def _batch_json(batch: StagedBatch) -> dict[str, Any]:
    planned = batch.planned
    names = ("batch_id", "batch_key", "size", "trigger", "redelivered")
    return {
        "batcher": batch.plan.batcher,
        **{name: getattr(planned, name) for name in names},
        "outcome": None if batch.outcome is None else asdict(batch.outcome),
    }


def _batch_table(batches: Sequence[StagedBatch]) -> list[str]:
    rows = []
    for plan, planned, outcome in batches[:SHOWN]:
        rows.append(
            (
                plan.batcher,
                planned.batch_id,
                cut(json.dumps(planned.batch_key), 30),
                planned.size,
                planned.trigger,
                None if outcome is None else outcome.successful,
                None if outcome is None else outcome.failed,
                None if outcome is None else cut(outcome.error) or None,
            )
        )
    heads = ("batcher", "batch", "key", "size", "trigger", "succeeded", "failed", "error")
    lines = table(heads, rows)
    if len(batches) > SHOWN:
        lines.append(f"These are {SHOWN} of {len(batches)}: --json has all.")
    return lines


def _report_lines(report: Mapping[str, Any]) -> list[str]:
    balanced = "balanced" if report["balanced"] else "NOT BALANCED"
    return [f"Report of {report['at']}: {balanced}.", *lines_of(report)]
