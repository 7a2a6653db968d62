"""``airflow-broadway where``: from a message's id to what became of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow.dataset as ds

from airflow_broadway.cli.output import cut, say, say_json
from airflow_broadway.cli.runs import iter_runs, open_root
from airflow_broadway.core.formats.entries import EntryLine, load_line
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.text import many
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.settlement_journal import settled_journal

__all__ = ["where"]


def where(given: argparse.Namespace) -> int:
    """Find a message in all staged runs; 1 if none has it."""
    store = open_root(given.staging)
    found = [
        place
        for run in iter_runs(store, dag_id=given.dag_id, pipeline=given.pipeline_name)
        for record in run.generations()
        for place in _places(run, record, given.message_id)
    ]
    found.sort(key=lambda each: str(each["received_at"]))
    if given.json:
        say_json(found)
    elif not found:
        say(
            f"No staged run under {store.uri} has received {given.message_id!r}: it still waits in"
            " its queue, or retention removed its run."
        )
    else:
        say(*_text(found))
    return 0 if found else 1


def _text(found: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for place in found:
        if lines:
            lines.append("")
        for name, value in place.items():
            text = json.dumps(value) if isinstance(value, (dict, list)) else value
            lines.append(f"{name.replace('_', ' ') + ':':14} {'-' if text is None else cut(text)}")
    return lines


# --------------------------------------------------------------------------------------------------


def _places(run: StagedRun, record: GenerationRecord, message_id: str) -> Iterator[dict[str, Any]]:
    """Where a generation has the message: nowhere, or once."""
    manifest = run.manifest(record.generation)
    if manifest is None:
        return
    line = _line(run, manifest.entries, message_id)
    if line is not None:
        verdict = _verdict(line)
        # A callback settled it at once: the row, if there is one, is only its data.
        yield _place(run, record, manifest, {"received_at": manifest.started_at}, verdict)
        return
    for batcher, files in manifest.files.items():
        for row in _rows(run, files, message_id, ["attempt", "redelivered", "received_at"]):
            row["received_at"] = row["received_at"].isoformat()
            found = _in_batch(run, batcher, record.generation, message_id)
            place = _place(run, record, manifest, row, None)
            place["batcher"] = batcher
            if found is not None:
                place |= _batch(run, *found, message_id, record.generation)
            yield place


def _place(
    run: StagedRun,
    record: GenerationRecord,
    manifest: Manifest,
    row: dict[str, Any],
    verdict: dict[str, Any] | None,
) -> dict[str, Any]:
    journal = settled_journal(run, record.generation)
    index = "" if record.map_index < 0 else f"[{record.map_index}]"
    settlement = record.state
    if journal is not None:
        settlement = f"settled at {journal.at}"
        if journal.report.lapsed:
            settlement += (
                f" ({many(journal.report.lapsed, 'message')} of its generation had lapsed)"
            )
    return {
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "pipeline": run.pipeline,
        "generation": manifest.generation,
        "task": f"{record.task_id}{index}",
        "received_at": row["received_at"],
        "attempt": row.get("attempt", verdict["attempt"] if verdict else None),
        "redelivered": row.get("redelivered"),
        "batcher": None,
        "batch_id": None,
        "outcome": "failed before any batch" if verdict and verdict["reason"] else None,
        "verdict": verdict["action"] if verdict else None,
        "reason": (verdict["reason"] or None) if verdict else None,
        "settlement": settlement,
    }


def _batch(
    run: StagedRun,
    plan: BatchPlan,
    planned: PlannedBatch,
    outcome: Outcome | None,
    message_id: str,
    generation: str,
) -> dict[str, Any]:
    """What a batch says of one of its messages."""
    place: dict[str, Any] = {"batch_id": planned.batch_id}
    if outcome is None:
        return place
    source = plan.generations.index(generation)
    line = _line(run, [outcome.exceptions] if outcome.exceptions else [], message_id, source)
    if line is None:
        return {**place, "outcome": "succeeded"}
    verdict = _verdict(line)
    return {
        **place,
        "outcome": "failed" if verdict["reason"] else _OTHER.get(verdict["action"], "succeeded"),
        "verdict": verdict["action"],
        "reason": verdict["reason"] or None,
    }


#: What an exception without a reason means: handle_batch did not say what became of it.
_OTHER = {"release": "none: handle_batch left it out"}


def _verdict(line: EntryLine) -> dict[str, Any]:
    action, delay, reason, stage = line.entry.verdict
    told = f"{action.value} in {delay:g} s" if delay else action.value
    told += " (at once)" if line.settled else ""
    return {"action": told, "reason": reason, "stage": stage, "attempt": line.entry.attempt}


def _in_batch(
    run: StagedRun, batcher: str, generation: str, message_id: str
) -> tuple[BatchPlan, PlannedBatch, Outcome | None] | None:
    recorded = Recorded(run)
    for plan in recorded.standing(batcher):
        if generation not in plan.generations:
            continue
        source = plan.generations.index(generation)
        files = [f"{plan.path}/{name}" for name in plan.data]
        numbers = {
            row["batch"]
            for row in _rows(run, files, message_id, ["batch", "source"])
            if row["source"] == source
        }
        for planned, outcome in recorded.outcomes(plan) if numbers else ():
            if any(low <= number <= high for low, high in planned.rows for number in numbers):
                return plan, planned, outcome
    return None


def _rows(
    run: StagedRun, files: Sequence[str], message_id: str, columns: list[str]
) -> list[dict[str, Any]]:
    """The rows of a message in some Parquet files: only the ids are read where it is not."""
    if not files:
        return []
    paths = [run.files.full(path) for path in files]
    wanted = ds.field("message_id") == message_id
    rows: list[dict[str, Any]] = []
    with translated("read messages", run.store.uri):
        for path in paths:
            found: Any = ds.dataset([path], format="parquet", filesystem=run.store.fs)
            if found.count_rows(filter=wanted):
                rows += found.to_table(columns=columns, filter=wanted).to_pylist()
    return rows


def _line(
    run: StagedRun, files: Sequence[str], message_id: str, source: int | None = None
) -> EntryLine | None:
    """The line that files of entries have of a message.

    :param source: Of which generation of the batch; lines without one are of any.
    """
    quoted = json.dumps(message_id)
    for path in files:
        for text in entry_lines(run.files, path):
            if quoted not in text:  # most lines: not worth parsing
                continue
            line = load_line(text)
            if line.entry.message_id == message_id and line.source in (None, source):
                return line
    return None
