"""``airflow-broadway runs``, ``show``, ``where`` and ``remove``: the runs of a staging root."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.cli.output import CommandError, Result, cut
from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import table
from airflow_broadway.runs.account import kept_report
from airflow_broadway.runs.reading.batches import StagedBatch, staged_batches
from airflow_broadway.runs.reading.message import find_message
from airflow_broadway.runs.reading.overview import Receipt, overview_of
from airflow_broadway.runs.reading.runs import (
    RunSummary,
    check_pipeline,
    find_run,
    iter_runs,
    list_runs,
)
from airflow_broadway.runs.sweep import remove_settled_run
from airflow_broadway.staging.plan_choice import Recorded

#: Batches in a table; JSON has all.
SHOWN = 50
#: Runs in a table without --limit; JSON has all.
NEWEST = 50


def runs(args: argparse.Namespace) -> Result:
    """Lists the staged runs, oldest first."""
    store = open_existing_store(args.staging)
    if args.pipeline_name is not None:
        check_pipeline(store, args.pipeline_name)
    limit = args.limit or (None if args.json else NEWEST)
    summaries, total = list_runs(
        store,
        dag_id=args.dag_id,
        pipeline=args.pipeline_name,
        newest=None if args.failed else limit,
    )
    if args.failed:
        summaries = [summary for summary in summaries if summary.trouble]
        total = len(summaries)
        summaries = summaries[-(limit or total) :]
    lines = _format_runs(summaries)
    if not summaries:
        kind = "runs that need looking at" if args.failed else "staged runs"
        of_dag = f" of the Dag {args.dag_id!r}" if args.dag_id else ""
        lines = [f"No {kind}{of_dag} under {redacted(store.uri)}."]
    if len(summaries) < total:
        lines.append(
            f"These are the {len(summaries)} newest of {total}: --limit {total} shows all."
        )
    if args.failed:
        lines += [f"{summary.run_id}: {summary.trouble}" for summary in summaries]
    return Result([asdict(summary) for summary in summaries], lines)


def _format_runs(summaries: Sequence[RunSummary]) -> list[str]:
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
        for summary in summaries
    )
    heads = ("time", "dag", "run", "pipeline", "received", "acked", "dead", "failed", "state")
    return table((*heads, "balanced"), rows)


def remove(args: argparse.Namespace) -> Result:
    """Removes the files of a settled run."""
    store = open_existing_store(args.staging)
    run = find_run(store, args.dag_id, args.run_id, args.pipeline_name)
    if not args.yes:
        raise CommandError(
            f"nothing was removed: use --yes to remove the files of run {run.run_id} of the Dag"
            f" {run.dag_id} for good"
        )
    remove_settled_run(run)
    text = f"Removed the files of run {run.run_id} of the Dag {run.dag_id}."
    return Result({"dag_id": run.dag_id, "run_id": run.run_id, "removed": True}, [text])


def show(args: argparse.Namespace) -> Result:
    """Describes one run: its generations, its batches and its report."""
    store = open_existing_store(args.staging)
    run = find_run(store, args.dag_id, args.run_id, args.pipeline_name)
    recorded, report = Recorded(run), kept_report(run)
    overview, batches = overview_of(run, recorded=recorded), list(staged_batches(recorded))
    value = {
        **asdict(overview.summary),
        "path": overview.path,
        "generations": [asdict(receipt) for receipt in overview.receipts],
        "batches": [_batch_to_json(batch) for batch in batches],
        "report": report,
    }
    state = overview.summary.state
    lines = [
        f"Run {run.run_id} of the Dag {run.dag_id}, pipeline {run.pipeline}: {state}.",
        f"Files: {overview.path}",
    ]
    if overview.receipts:
        lines += ["", *_format_generations(overview.receipts)]
    if batches:
        lines += ["", *_format_batches(batches)]
    if report is not None:
        balanced = "balanced" if report["balanced"] else "NOT BALANCED"
        lines += ["", f"Report of {report['at']}: {balanced}.", *lines_of(report)]
    return Result(value, lines)


def _format_generations(receipts: Sequence[Receipt]) -> list[str]:
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


def _batch_to_json(batch: StagedBatch) -> dict[str, Any]:
    planned = batch.planned
    names = ("batch_id", "batch_key", "size", "trigger", "redelivered")
    return {
        "batcher": batch.plan.batcher,
        **{name: getattr(planned, name) for name in names},
        "outcome": None if batch.outcome is None else asdict(batch.outcome),
    }


def _format_batches(batches: Sequence[StagedBatch]) -> list[str]:
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


def where(args: argparse.Namespace) -> Result:
    """Traces a message through all staged runs; the exit code is 1 if no run received it."""
    store = open_existing_store(args.staging)
    staged = iter_runs(store, dag_id=args.dag_id, pipeline=args.pipeline_name)
    places = [asdict(story.place) for story in find_message(staged, args.message_id)]
    lines: list[str] = []
    for place in places:
        lines += [""] if lines else []
        for name, value in place.items():
            text = "-" if value is None else cut(value)
            lines.append(f"{name.replace('_', ' ') + ':':14} {text}")
    if not places:
        text = f"No staged run under {redacted(store.uri)} has received {args.message_id!r}: it"
        lines = [f"{text} still waits in its queue, or retention removed its run."]
    return Result(places, lines, int(not places))
