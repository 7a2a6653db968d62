"""``airflow-broadway runs``, ``show`` and ``remove``: the runs of a staging root."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.cli.output import CommandError, cut, print_json, print_lines
from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import table
from airflow_broadway.runs.account import kept_report
from airflow_broadway.runs.reading.batches import StagedBatch, staged_batches
from airflow_broadway.runs.reading.overview import Receipt, overview_of
from airflow_broadway.runs.reading.runs import (
    RunSummary,
    check_pipeline,
    find_run,
    list_runs,
)
from airflow_broadway.runs.sweep import remove_settled_run
from airflow_broadway.staging.plan_choice import Recorded

#: Batches in a table; JSON has all.
SHOWN = 50
#: Runs in a table without --limit; JSON has all.
NEWEST = 50


def runs(args: argparse.Namespace) -> int:
    """Lists the staged runs, oldest first."""
    if args.limit is not None and args.limit < 1:
        raise CommandError(f"--limit is to be at least 1, not {args.limit}")
    store = open_existing_store(args.staging)
    if args.pipeline_name is not None:
        check_pipeline(store, args.pipeline_name)
    summaries = list_runs(store, dag_id=args.dag_id, pipeline=args.pipeline_name)
    if args.failed:
        summaries = [summary for summary in summaries if summary.trouble]
    total = len(summaries)
    summaries = summaries[-(args.limit or (total if args.json else NEWEST)) :]
    if args.json:
        print_json([asdict(summary) for summary in summaries])
        return 0
    if not summaries:
        kind = "runs that need looking at" if args.failed else "staged runs"
        of_dag = f" of the Dag {args.dag_id!r}" if args.dag_id else ""
        print_lines(f"No {kind}{of_dag} under {redacted(store.uri)}.")
        return 0
    print_lines(*_format_runs(summaries))
    if len(summaries) < total:
        print_lines(f"These are the {len(summaries)} newest of {total}: --limit {total} shows all.")
    for summary in summaries if args.failed else ():
        print_lines(f"{summary.run_id}: {summary.trouble}")
    return 0


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


def remove(args: argparse.Namespace) -> int:
    """Removes the files of a settled run."""
    store = open_existing_store(args.staging)
    run = find_run(store, args.dag_id, args.run_id, args.pipeline_name)
    if not args.yes:
        raise CommandError(
            f"nothing was removed: use --yes to remove the files of run {run.run_id} of the Dag"
            f" {run.dag_id} for good"
        )
    remove_settled_run(run)
    if args.json:
        print_json({"dag_id": run.dag_id, "run_id": run.run_id, "removed": True})
    else:
        print_lines(f"Removed the files of run {run.run_id} of the Dag {run.dag_id}.")
    return 0


def show(args: argparse.Namespace) -> int:
    """Prints one run: its generations, its batches and its report."""
    store = open_existing_store(args.staging)
    run = find_run(store, args.dag_id, args.run_id, args.pipeline_name)
    recorded, report = Recorded(run), kept_report(run)
    overview, batches = overview_of(run, recorded=recorded), list(staged_batches(recorded))
    summary = overview.summary
    if args.json:
        print_json(
            {
                **asdict(summary),
                "path": overview.path,
                "generations": [asdict(receipt) for receipt in overview.receipts],
                "batches": [_batch_to_json(batch) for batch in batches],
                "report": report,
            }
        )
        return 0
    print_lines(
        f"Run {run.run_id} of the Dag {run.dag_id}, pipeline {run.pipeline}: {summary.state}.",
        f"Files: {overview.path}",
    )
    if overview.receipts:
        print_lines("", *_format_generations(overview.receipts))
    if batches:
        print_lines("", *_format_batches(batches))
    if report is not None:
        print_lines("", *_report_lines(report))
    return 0


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


def _report_lines(report: Mapping[str, Any]) -> list[str]:
    balanced = "balanced" if report["balanced"] else "NOT BALANCED"
    return [f"Report of {report['at']}: {balanced}.", *lines_of(report)]
