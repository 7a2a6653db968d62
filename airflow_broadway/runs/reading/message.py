"""Finds a message in staged runs, by its id or by a text in it, and reports what became of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.formats.entries import EntryLine, load_line
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import Outcome, entry_lines
from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.text import many
from airflow_broadway.runs.heartbeat import name_of
from airflow_broadway.runs.reading.payload import Payload, payload_of
from airflow_broadway.runs.reading.runs import iter_runs
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.settling.journal import settled_journal
from airflow_broadway.staging.store import Store
from airflow_broadway.staging.tables import ParquetFile

#: Messages that a search by text names at most.
MOST_HITS: Final = 20
#: Seconds after which a search by text ends, and says so.
MOST_SECONDS: Final = 10.0
#: Runs of a Dag that are looked through for a message, the newest first.
MOST_RUNS: Final = 50
#: The columns of message files that hold a payload: as received first, then as
#: ``handle_message`` returned it.
_DATA: Final = ("_payload", "data_bytes", "data", "data_json")
#: Those that a text is searched in.
_SEARCHED: Final = (*_DATA, "batch_key")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a message's way.

    :param at: When, as ISO 8601; empty where that is not recorded.
    :param tone: ``good``, ``warn``, ``bad``, ``busy`` or empty.
    """

    what: str
    detail: str = ""
    at: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What became of a message at one receipt.

    :param payload: What it carries; ``None`` if that was not asked for, or is not staged.
    """

    place: MessagePlace
    steps: Sequence[Step]
    payload: Payload | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextHits:
    """Messages in which a text is.

    :param ids: Their ids, in order of receipt.
    :param looked_at: Messages that were looked at.
    :param whole: Whether that were all that are staged.
    """

    ids: Sequence[str]
    looked_at: int
    whole: bool


# -- one message -----------------------------------------------------------------------------------


def other_runs(store: Store, run: StagedRun) -> list[StagedRun]:
    """The other runs of the same pipeline and Dag, the newest folders first: so many at most."""
    runs = iter_runs(store, dag_id=run.dag_id, pipeline=run.pipeline)
    found = [each for each in runs if each.run_id != run.run_id]
    return found[::-1][:MOST_RUNS]


def find_message(
    runs: Iterable[StagedRun], message_id: str, *, with_payload: bool = False
) -> list[Story]:
    """Find a message in these runs: once for each generation that received it, in that order.

    :param with_payload: Whether to read what the message carries, too.
    :raises StagingError: If files cannot be read.
    """
    stories = [
        story
        for run in runs
        for record in run.generations()
        for story in _stories(run, record, message_id, with_payload=with_payload)
    ]
    return sorted(stories, key=lambda story: story.place.received_at)


def _stories(
    run: StagedRun, record: GenerationRecord, message_id: str, *, with_payload: bool
) -> Iterator[Story]:
    """What became of the message in a generation: it received it once, or not at all."""
    manifest = run.manifest(record.generation)
    if manifest is None:
        return
    line = _line(run, manifest.entries, message_id)
    files = [(batcher, path) for batcher, paths in manifest.files.items() for path in paths]
    batcher, row = None, None
    if line is None or with_payload:
        batcher, row = _staged_row(run, files, message_id)
    if line is not None:
        # A callback settled it immediately: the row, if there is one, is only its data.
        fate = _fate_without_batch(manifest, line)
    elif row is not None and batcher is not None:
        fate = {
            "received_at": row["received_at"].isoformat(),
            "attempt": row["attempt"],
            "redelivered": row["redelivered"],
            "batcher": batcher,
            **_in_batch(run, batcher, record.generation, message_id),
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
        **fate,
    )
    payload = _payload(row, line) if with_payload else None
    yield Story(place=place, steps=list(_steps(place)), payload=payload)


def _fate_without_batch(manifest: Manifest, line: EntryLine) -> dict[str, Any]:
    verdict = line.entry.verdict
    return {
        **dict.fromkeys(("redelivered", "batcher", "batch_id", "handled_at")),
        "received_at": manifest.started_at,
        "attempt": line.entry.attempt,
        "outcome": "failed before any batch" if verdict.reason else None,
        "verdict": _verdict(line),
        "reason": verdict.reason or None,
    }


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


def _staged_row(
    run: StagedRun, files: Iterable[tuple[str, str]], message_id: str
) -> tuple[str | None, dict[str, Any] | None]:
    """The batcher that a message is staged for, and its row; ``None`` where no file has it."""
    for batcher, path in files:
        columns = ["attempt", "redelivered", "received_at", *_DATA]
        for row in _rows(run, [path], message_id, columns):
            return batcher, row
    return None, None


def _rows(
    run: StagedRun, files: Iterable[str], message_id: str, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The rows of a message in some Parquet files: only the ids are read where it is not.

    :param columns: Those that are read, as far as a file has them.
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


def _payload(row: Mapping[str, Any] | None, line: EntryLine | None) -> Payload | None:
    """What a message carries: as it was received where that is kept, else what ``handle_message``
    returned; of one that failed early, what its verdict has of it.
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
    came = []
    if place.attempt is not None:
        came.append(f"attempt {place.attempt}")
    if place.redelivered:
        came.append("it had come before")
    yield Step(what=f"received by {place.task}", detail=", ".join(came), at=place.received_at)
    if place.batcher is None:
        failed = place.outcome is not None
        yield Step(
            what=place.outcome or "handled, without a batch",
            detail=place.reason or "",
            tone="bad" if failed else "good",
        )
    else:
        yield Step(what=f"handled, and staged for the batcher {place.batcher}", tone="good")
        yield _batch_step(place)
    if place.settled_at is None:
        what = f"not settled yet: its generation is {place.settlement}"
        yield Step(what=what, tone="busy")
        return
    yield Step(
        what=_done(place),
        detail=place.settlement.removeprefix("settled").strip(" ()"),
        at=place.settled_at,
        tone=_tone(place),
    )


def _batch_step(place: MessagePlace) -> Step:
    if place.batch_id is None:
        return Step(what="waits for its batch to be planned", tone="busy")
    if place.outcome is None:
        return Step(what=f"in batch {place.batch_id}, which has no outcome", tone="busy")
    return Step(
        what=f"in batch {place.batch_id}: {place.outcome}",
        detail=place.reason or "",
        at=place.handled_at or "",
        tone="good" if place.outcome == "succeeded" else "bad",
    )


def _done(place: MessagePlace) -> str:
    """What its broker was told."""
    if place.batcher is not None and place.outcome is None:
        return "given back: its batch had no outcome"
    return f"settled: {place.verdict or 'ack'}"


def _tone(place: MessagePlace) -> str:
    if place.batcher is not None and place.outcome is None:
        return "warn"
    verdict = place.verdict or "ack"
    if verdict.startswith("ack"):
        return "good"
    return "bad" if verdict.startswith("dead_letter") else "warn"


# -- by a text -------------------------------------------------------------------------------------


def ids_with_text(
    run: StagedRun, text: str, *, share: float = 1.0, clock: Clock | None = None
) -> TextHits:
    """The messages of a run in which a text is, whatever its case; so many at most.

    :param share: The part of the time that there is for this run.
    :raises StagingError: If files cannot be read.
    """
    clock = clock or SystemClock()
    ends = clock.monotonic() + MOST_SECONDS * share
    ids: dict[str, None] = {}
    looked_at = 0
    for message_ids, found in _searched(run, text):
        looked_at += message_ids
        ids.update(dict.fromkeys(found))
        if len(ids) >= MOST_HITS or clock.monotonic() > ends:
            return TextHits(ids=list(ids)[:MOST_HITS], looked_at=looked_at, whole=False)
    return TextHits(ids=list(ids), looked_at=looked_at, whole=True)


def _searched(run: StagedRun, text: str) -> Iterator[tuple[int, list[str]]]:
    """A part of the messages after the other: how many, and the ids of those that have it."""
    for record in run.generations():
        manifest = run.manifest(record.generation)
        if manifest is not None:
            for files in manifest.files.values():
                for path in files:
                    yield from _in_file(run, path, text)
            yield from _in_entries(run, manifest, text)


def _in_file(run: StagedRun, path: str, text: str) -> Iterator[tuple[int, list[str]]]:
    with ParquetFile(run.files, path) as file:
        data = [name for name in file.columns if name in _SEARCHED]
        for group in range(file.groups):
            table = file.read(group, ["message_id", *data])
            mask = _matches([table.column(name) for name in data], text)
            ids = [] if mask is None else table.column("message_id").filter(mask).to_pylist()
            yield table.num_rows, [str(each) for each in ids]


def _in_entries(run: StagedRun, manifest: Manifest, text: str) -> Iterator[tuple[int, list[str]]]:
    wanted = text.casefold().encode()
    for path in manifest.entries:
        for line in entry_lines(run.files, path):
            entry = load_line(line).entry
            body = (entry.payload or b"").lower()
            yield 1, [entry.message_id] if wanted in body else []


def _matches(columns: Iterable[Any], text: str) -> Any:
    """Which rows have the text in one of these columns, or of their fields."""
    mask = None
    for column in columns:
        for leaf in _leaves(column.combine_chunks()):
            found = pc.fill_null(pc.match_substring(leaf, text, ignore_case=True), False)
            mask = found if mask is None else pc.or_(mask, found)
    return mask


def _leaves(array: Any) -> Iterator[Any]:
    """The texts of a column: of each field of a struct, numbers and instants as text."""
    kind = array.type
    if pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            yield from _leaves(pc.struct_field(array, index))
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        yield array
    elif pa.types.is_nested(kind):  # lists and maps: as JSON has them
        values = [json.dumps(each, default=str, ensure_ascii=False) for each in array.to_pylist()]
        yield pa.array(values, pa.string())
    else:
        yield array.cast(pa.string())
