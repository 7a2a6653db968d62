"""From a message's id to where staged runs have it, and what became of it.  Changes no file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow.dataset as ds

from airflow_broadway.core.formats.entries import EntryLine, load_line
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.text import many
from airflow_broadway.runs.heartbeat import name_of
from airflow_broadway.runs.inspect import iter_runs
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.settlement_journal import settled_journal
from airflow_broadway.staging.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePlace:
    """Where a run has a message, and what became of it there.

    :param task: The task instance that received it, such as ``process[0]``.
    :param handled_at: When the handling of its batch began.
    :param outcome: What its callbacks came to, in words; ``None`` if nothing is recorded.
    :param verdict: What is done with it at its broker, where that is not the default.
    :param settlement: How far its generation is, in words.
    :param settled_at: When that was settled; ``None`` before.
    """

    dag_id: str
    run_id: str
    pipeline: str
    generation: str
    task: str
    received_at: str
    attempt: int | None
    redelivered: bool | None
    batcher: str | None
    batch_id: str | None
    handled_at: str | None
    outcome: str | None
    verdict: str | None
    reason: str | None
    settlement: str
    settled_at: str | None


def find_message(
    store: Store, message_id: str, *, dag_id: str | None = None, pipeline: str | None = None
) -> list[MessagePlace]:
    """Where staged runs have a message, in order of its receipts: once for each generation."""
    return find_in(iter_runs(store, dag_id=dag_id, pipeline=pipeline), message_id)


def find_in(runs: Iterable[StagedRun], message_id: str) -> list[MessagePlace]:
    """Where these runs have a message; else as :func:`find_message`."""
    found = [
        place
        for run in runs
        for record in run.generations()
        for place in _places(run, record, message_id)
    ]
    return sorted(found, key=lambda each: each.received_at)


def _places(run: StagedRun, record: GenerationRecord, message_id: str) -> Iterator[MessagePlace]:
    """Where a generation has the message: nowhere, or once."""
    manifest = run.manifest(record.generation)
    if manifest is None:
        return
    about = {
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "pipeline": run.pipeline,
        "generation": record.generation,
        "task": name_of(record),
        **_settlement(run, record),
    }
    line = _line(run, manifest.entries, message_id)
    if line is not None:
        # A callback settled it at once: the row, if there is one, is only its data.
        verdict = line.entry.verdict
        yield MessagePlace(
            **about,
            received_at=manifest.started_at,
            attempt=line.entry.attempt,
            redelivered=None,
            batcher=None,
            batch_id=None,
            handled_at=None,
            outcome="failed before any batch" if verdict.reason else None,
            verdict=_verdict(line),
            reason=verdict.reason or None,
        )
        return
    for batcher, files in manifest.files.items():
        for row in _rows(run, files, message_id, ["attempt", "redelivered", "received_at"]):
            yield MessagePlace(
                **about,
                received_at=row["received_at"].isoformat(),
                attempt=row["attempt"],
                redelivered=row["redelivered"],
                batcher=batcher,
                **_in_batch(run, batcher, record.generation, message_id),
            )


def _settlement(run: StagedRun, record: GenerationRecord) -> dict[str, Any]:
    """How far a generation is, for people."""
    journal = settled_journal(run, record.generation)
    if journal is None:
        return {"settlement": record.state, "settled_at": None}
    lapsed = journal.report.lapsed
    more = f" ({many(lapsed, 'message')} of its generation had lapsed)" if lapsed else ""
    return {"settlement": f"settled{more}", "settled_at": journal.at}


def _in_batch(run: StagedRun, batcher: str, generation: str, message_id: str) -> dict[str, Any]:
    """What its batch says of a message."""
    about: dict[str, Any] = dict.fromkeys(
        ("batch_id", "handled_at", "outcome", "verdict", "reason")
    )
    found = _batch_of(run, batcher, generation, message_id)
    if found is None:
        return about
    plan, planned, outcome = found
    about["batch_id"] = planned.batch_id
    if outcome is None:
        return about
    about["handled_at"] = outcome.started_at or None
    source = plan.generations.index(generation)
    line = _line(run, [outcome.exceptions] if outcome.exceptions else [], message_id, source)
    if line is None:
        return {**about, "outcome": "succeeded"}
    verdict = line.entry.verdict
    said = _UNSAID.get(verdict.action.value, "succeeded")
    return {
        **about,
        "outcome": "failed" if verdict.reason else said,
        "verdict": _verdict(line),
        "reason": verdict.reason or None,
    }


#: What an exception without a reason means: handle_batch did not say what became of it.
_UNSAID: Final = {"release": "none: handle_batch left it out"}


def _verdict(line: EntryLine) -> str:
    action, delay, _, _ = line.entry.verdict
    text = f"{action.value} in {delay:g} s" if delay else action.value
    return f"{text} (at once)" if line.settled else text


def _batch_of(
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
    wanted = ds.field("message_id") == message_id
    rows: list[dict[str, Any]] = []
    with translated("read messages", run.store.uri):
        for path in map(run.files.full, files):
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
