"""Where a message is: what became of it at each receipt; and messages by what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.formats.entries import load_line
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.outcome import entry_lines
from airflow_broadway.runs.find import MessagePlace, find_in
from airflow_broadway.runs.inspect import iter_runs
from airflow_broadway.runs.view.payload import Payload, payload_of
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.staging.tables import ParquetFile

#: Messages that a search by text names at most.
MOST_HITS: Final = 20
#: Seconds after which a search by text ends, and says so.
MOST_SECONDS: Final = 10.0
#: Runs of a Dag that are looked through for a message, the newest first.
MOST_RUNS: Final = 50
#: The columns of message files that hold what a message carries.
_DATA: Final = ("data", "data_bytes", "data_json", "_payload")
#: Those that a text is looked for in.
_SEARCHED: Final = (*_DATA, "batch_key")


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


def stories_of(
    runs: Sequence[StagedRun], message_id: str, *, with_payload: bool = False
) -> list[Story]:
    """What became of a message in these runs, in order of its receipts.

    :param with_payload: Whether what it carries is shown, too.
    :raises StagingError: If files cannot be read.
    """
    by_name = {(each.pipeline, each.run_id): each for each in runs}
    found = []
    for place in find_in(runs, message_id):
        run = by_name[place.pipeline, place.run_id]
        payload = _payload(run, place, message_id) if with_payload else None
        found.append(Story(place=place, steps=list(_steps(place)), payload=payload))
    return found


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


def _payload(run: StagedRun, place: MessagePlace, message_id: str) -> Payload | None:
    """What a message carries, where it was staged; of one that failed early, if its verdict has
    it.
    """
    manifest = run.manifest(place.generation)
    if manifest is None:
        return None
    for files in manifest.files.values():
        for path in files:
            row = _row(run, path, message_id)
            if row is not None:
                value, received = _carried(row)
                return payload_of(value, received=received)
    quoted = json.dumps(message_id)
    for path in manifest.entries:
        for text in entry_lines(run.files, path):
            if quoted in text:
                entry = load_line(text).entry
                if entry.message_id == message_id and entry.payload is not None:
                    return payload_of(entry.payload, received=True)
    return None


def _row(run: StagedRun, path: str, message_id: str) -> dict[str, Any] | None:
    """The row of a message in a message file."""
    with ParquetFile(run.files, path) as file:
        data = [name for name in file.columns if name in _DATA]
        for group in range(file.groups):
            ids = file.read(group, ["message_id"]).column("message_id")
            at = pc.index(ids, pa.scalar(message_id)).as_py()
            if at >= 0:
                row: dict[str, Any] = file.read(group, data).slice(at, 1).to_pylist()[0]
                return row
    return None


def _carried(row: dict[str, Any]) -> tuple[Any, bool]:
    """The payload as received where it is kept, and that it is; else what ``handle_message`` made
    of it.
    """
    for name in ("_payload", "data_bytes", "data", "data_json"):
        value = row.get(name)
        if value is not None:
            made = json.loads(value) if name == "data_json" else value
            return made, name == "_payload"
    return None, False


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
