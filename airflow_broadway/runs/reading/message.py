"""Finds a message in staged runs by its id or by text in it, and reports its history."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.formats.entries import EntryLine, load_line
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.text import pluralize
from airflow_broadway.runs.heartbeat import name_of
from airflow_broadway.runs.reading.payload import Payload, payload_of
from airflow_broadway.runs.reading.runs import iter_runs
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.settling.journal import settled_journal
from airflow_broadway.staging.store import Store
from airflow_broadway.staging.tables import ParquetFile

#: Maximum number of messages in the result of a text search.
MOST_HITS: Final = 20
#: Seconds after which a text search ends with a partial result.
MOST_SECONDS: Final = 10.0
#: Maximum number of runs of a Dag searched for a message, newest first.
MOST_RUNS: Final = 50
#: The columns of message files that hold a payload: as received first, then as
#: ``handle_message`` returned it.
_DATA: Final = ("_payload", "data_bytes", "data", "data_json")
#: The columns that a text search reads.
_SEARCHED: Final = (*_DATA, "batch_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePlace:
    """The position of a message in a run, and its outcome there.

    :param task: The task instance that received it, such as ``process[0]``.
    :param handled_at: Time at which handling of its batch began.
    :param outcome: The result of its callbacks, in words; ``None`` if none is recorded.
    :param verdict: The action at its broker, unless it is the default.
    :param settlement: The settlement state of its generation, in words.
    :param settled_at: Time at which its generation was settled; ``None`` before.
    """

    dag_id: str
    run_id: str
    pipeline: str
    generation: str
    task: str
    received_at: str
    attempt: int | None
    redelivered: bool | None = None
    batcher: str | None = None
    batch_id: str | None = None
    handled_at: str | None = None
    outcome: str | None = None
    verdict: str | None = None
    reason: str | None = None
    settlement: str
    settled_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step in the history of a message.

    :param at: Time as ISO 8601; empty if it is not recorded.
    :param tone: ``good``, ``warn``, ``bad``, ``busy`` or empty.
    """

    title: str
    detail: str = ""
    at: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The history of one receipt of a message.

    :param payload: Its payload; ``None`` if it was not requested or is not staged.
    """

    place: MessagePlace
    steps: Sequence[Step]
    payload: Payload | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextHits:
    """Messages that contain a text.

    :param ids: Their ids, in order of receipt.
    :param looked_at: Number of messages searched.
    :param whole: Whether all staged messages were searched.
    """

    ids: Sequence[str]
    looked_at: int
    whole: bool


# -- one message -----------------------------------------------------------------------------------


def other_runs(store: Store, run: StagedRun) -> list[StagedRun]:
    """Lists other runs of the same pipeline and Dag, newest first, up to ``MOST_RUNS``."""
    runs = iter_runs(store, dag_id=run.dag_id, pipeline=run.pipeline)
    return [other for other in runs if other.run_id != run.run_id][::-1][:MOST_RUNS]


def find_message(
    runs: Iterable[StagedRun], message_id: str, *, with_payload: bool = False
) -> list[Story]:
    """Finds a message in these runs, once per generation that received it, in order of receipt.

    :param with_payload: Whether to also read the payload.
    :raises StagingError: If files cannot be read.
    """
    stories = [
        story
        for run in runs
        for record in run.generations()
        for story in _find_stories(run, record, message_id, with_payload=with_payload)
    ]
    return sorted(stories, key=lambda story: story.place.received_at)


def _find_stories(
    run: StagedRun, record: GenerationRecord, message_id: str, *, with_payload: bool
) -> Iterator[Story]:
    """Yields the message's history in a generation, which received it at most once."""
    manifest = run.manifest(record.generation)
    if manifest is None:
        return
    line = _line(run, manifest.entries, message_id)
    files = [(batcher, path) for batcher, paths in manifest.files.items() for path in paths]
    batcher, row = None, None
    fields: dict[str, Any]
    if line is None or with_payload:
        batcher, row = _find_staged_row(run, files, message_id)
    if line is not None:
        # A callback settled it immediately; a row, if there is one, holds only its data.
        fields = {
            "received_at": manifest.started_at,
            "attempt": line.entry.attempt,
            "outcome": "failed before any batch" if line.entry.verdict.reason else None,
            **_verdict_fields(line),
        }
    elif row is not None and batcher is not None:
        fields = {
            "received_at": row["received_at"].isoformat(),
            "attempt": row["attempt"],
            "redelivered": row["redelivered"],
            "batcher": batcher,
            **_batch_fields(run, batcher, record.generation, message_id),
        }
    else:
        return
    place = MessagePlace(
        dag_id=run.dag_id,
        run_id=run.run_id,
        pipeline=run.pipeline,
        generation=record.generation,
        task=name_of(record),
        **_settlement(run, record),
        **fields,
    )
    payload = _payload(row, line) if with_payload else None
    yield Story(place=place, steps=list(_steps(place)), payload=payload)


def _settlement(run: StagedRun, record: GenerationRecord) -> dict[str, Any]:
    """Describes the settlement state of a generation."""
    journal = settled_journal(run, record.generation)
    if journal is None:
        return {"settlement": record.state}
    lapsed = journal.report.lapsed
    more = f" ({pluralize(lapsed, 'message')} of its generation had lapsed)" if lapsed else ""
    return {"settlement": f"settled{more}", "settled_at": journal.at}


def _batch_fields(run: StagedRun, batcher: str, generation: str, message_id: str) -> dict[str, Any]:
    """Reads the outcome of a message from its batch."""
    batch = _find_batch(run, batcher, generation, message_id)
    if batch is None:
        return {}
    plan, planned, outcome = batch
    if outcome is None:
        return {"batch_id": planned.batch_id}
    fields = {"batch_id": planned.batch_id, "handled_at": outcome.started_at or None}
    source = plan.generations.index(generation)
    line = _line(run, [outcome.exceptions] if outcome.exceptions else [], message_id, source)
    if line is None:
        return {**fields, "outcome": "succeeded"}
    verdict, result = line.entry.verdict, "succeeded"
    if verdict.reason:
        result = "failed"
    elif verdict.action is Action.RELEASE:
        result = "none: handle_batch left it out"
    return {**fields, "outcome": result, **_verdict_fields(line)}


def _verdict_fields(line: EntryLine) -> dict[str, str | None]:
    action, delay, reason, *_ = line.entry.verdict
    text = f"{action.value} in {delay:g} s" if delay else action.value
    verdict = f"{text} (immediately)" if line.settled else text
    return {"verdict": verdict, "reason": reason or None}


def _find_batch(
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


def _find_staged_row(
    run: StagedRun, files: Iterable[tuple[str, str]], message_id: str
) -> tuple[str | None, dict[str, Any] | None]:
    """Finds the batcher that a message is staged for and its row; ``None`` if it is in no file."""
    for batcher, path in files:
        columns = ["attempt", "redelivered", "received_at", *_DATA]
        for row in _rows(run, [path], message_id, columns):
            return batcher, row
    return None, None


def _rows(
    run: StagedRun, files: Iterable[str], message_id: str, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the rows of a message; of row groups without it only the id column is read.

    :param columns: The columns to read, where a file has them.
    """
    for path in files:
        with ParquetFile(run.files, path) as file:
            present = [name for name in columns if name in file.columns]
            for group in range(file.groups):
                ids = file.read(group, ["message_id"]).column("message_id")
                rows = pc.equal(ids, pa.scalar(message_id))
                if pc.any(rows).as_py():
                    yield from file.read(group, present).filter(rows).to_pylist()


def _line(
    run: StagedRun, files: Sequence[str], message_id: str, source: int | None = None
) -> EntryLine | None:
    """Finds the line of a message in entry files.

    :param source: Index of the generation in the batch; a line without an index matches any.
    """
    quoted = json.dumps(message_id)
    for path in files:
        for text in entry_lines(run.files, path):
            if quoted not in text:  # skips parsing of most lines
                continue
            line = load_line(text)
            if line.entry.message_id == message_id and line.source in (None, source):
                return line
    return None


def _payload(row: Mapping[str, Any] | None, line: EntryLine | None) -> Payload | None:
    """Returns the payload as received if it is stored, else the data that ``handle_message``
    returned.  For a message that failed earlier it is the payload in its verdict.
    """
    for name in _DATA:
        value = None if row is None else row.get(name)
        if value is not None:
            data = json.loads(value) if name == "data_json" else value
            return payload_of(data, received=name == "_payload")
    if line is not None and line.entry.payload is not None:
        return payload_of(line.entry.payload, received=True)
    return None


def _steps(place: MessagePlace) -> Iterator[Step]:
    details = []
    if place.attempt is not None:
        details.append(f"attempt {place.attempt}")
    if place.redelivered:
        details.append("redelivered")
    yield Step(title=f"received by {place.task}", detail=", ".join(details), at=place.received_at)
    if place.batcher is None:
        failed = place.outcome is not None
        yield Step(
            title=place.outcome or "handled, without a batch",
            detail=place.reason or "",
            tone="bad" if failed else "good",
        )
    else:
        yield Step(title=f"handled, and staged for the batcher {place.batcher}", tone="good")
        yield _batch_step(place)
    if place.settled_at is None:
        yield Step(title=f"not settled yet: its generation is {place.settlement}", tone="busy")
        return
    verdict = place.verdict or "ack"
    title, tone = f"settled: {verdict}", "warn"
    if place.batcher is not None and place.outcome is None:
        title = "released: its batch had no outcome"
    elif verdict.startswith("ack"):
        tone = "good"
    elif verdict.startswith("dead_letter"):
        tone = "bad"
    detail = place.settlement.removeprefix("settled").strip(" ()")
    yield Step(title=title, detail=detail, at=place.settled_at, tone=tone)


def _batch_step(place: MessagePlace) -> Step:
    if place.batch_id is None:
        return Step(title="waits for its batch to be planned", tone="busy")
    if place.outcome is None:
        return Step(title=f"in batch {place.batch_id}, which has no outcome", tone="busy")
    return Step(
        title=f"in batch {place.batch_id}: {place.outcome}",
        detail=place.reason or "",
        at=place.handled_at or "",
        tone="good" if place.outcome == "succeeded" else "bad",
    )


# -- search by text --------------------------------------------------------------------------------


def ids_with_text(
    run: StagedRun, text: str, *, share: float = 1.0, clock: Clock | None = None
) -> TextHits:
    """Finds up to ``MOST_HITS`` messages of a run that contain a text, case-insensitively.

    :param share: The share of ``MOST_SECONDS`` that this run may take.
    :raises StagingError: If files cannot be read.
    """
    clock = clock or SystemClock()
    ends = clock.monotonic() + MOST_SECONDS * share
    ids: dict[str, None] = {}
    looked_at = 0
    for message_ids, matching_ids in _scan_run(run, text):
        looked_at += message_ids
        ids.update(dict.fromkeys(matching_ids))
        if len(ids) >= MOST_HITS or clock.monotonic() > ends:
            return TextHits(ids=list(ids)[:MOST_HITS], looked_at=looked_at, whole=False)
    return TextHits(ids=list(ids), looked_at=looked_at, whole=True)


def _scan_run(run: StagedRun, text: str) -> Iterator[tuple[int, list[str]]]:
    """Searches part by part; yields the number of messages and the matching ids of each part."""
    needle = text.casefold().encode()
    for record in run.generations():
        manifest = run.manifest(record.generation)
        if manifest is None:
            continue
        for path in chain.from_iterable(manifest.files.values()):
            yield from _scan_file(run, path, text)
        for path in manifest.entries:
            for line in entry_lines(run.files, path):
                entry = load_line(line).entry
                yield 1, [entry.message_id] if needle in (entry.payload or b"").lower() else []


def _scan_file(run: StagedRun, path: str, text: str) -> Iterator[tuple[int, list[str]]]:
    with ParquetFile(run.files, path) as file:
        data = [name for name in file.columns if name in _SEARCHED]
        for group in range(file.groups):
            table = file.read(group, ["message_id", *data])
            ids = table.column("message_id").filter(_matches(table.select(data), text))
            yield table.num_rows, [str(message_id) for message_id in ids.to_pylist()]


def _matches(table: pa.Table, text: str) -> Any:
    """Returns the mask of rows with the text in a column or a field of a struct."""
    mask = pa.repeat(False, table.num_rows)
    while any(pa.types.is_struct(column.type) for column in table.columns):
        table = table.flatten()
    for column in table.columns:
        kind = column.type
        if pa.types.is_nested(kind):  # lists and maps become JSON
            values = column.to_pylist()
            texts = [json.dumps(value, default=str, ensure_ascii=False) for value in values]
            column = pa.chunked_array([pa.array(texts, pa.string())])
        elif not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            column = column.cast(pa.string())
        matches = pc.match_substring(column, text, ignore_case=True)
        mask = pc.or_(mask, pc.fill_null(matches, False))
    return mask
