"""The dead-letter table: a row for each message that a settlement dead-letters.

The rows of a generation are committed after its settlement is decided, and before the broker
dead-letters any message.  The decision is written once: whichever process carries out or repeats
the settlement commits the same rows under the same commit ids, and the table accepts each once.
"""

from __future__ import annotations

import json
import logging
import secrets
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from airflow_broadway.core.custody.protocol import DeadLettered, Settlement
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.layout import VERSION, check_version
from airflow_broadway.core.masking import reason_of
from airflow_broadway.core.model.batch_info import BatchInfo, Trigger
from airflow_broadway.core.model.connections import Connections
from airflow_broadway.core.model.sink import Commit, CommitRefused, SinkClient, SinkEnv, SinkError
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.schema.ddl import parse_schema
from airflow_broadway.core.text import pluralize
from airflow_broadway.staging.arrow_schema import arrow_struct
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.received import plain_text, received_rows
from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
from airflow_broadway.staging.settling.journal import settling_record

T = TypeVar("T")

log = logging.getLogger(__name__)

#: The columns of the table.
COLUMNS: Final = pa.schema(
    arrow_struct(
        parse_schema(
            "message_id string, payload binary, payload_text string, reason string, stage string,"
            " exception string, attempt int, batcher string, batch_id string,"
            " enqueued_at timestamp, received_at timestamp, settled_at timestamp,"
            " pipeline string, dag_id string, run_id string, generation string"
        )
    )
)
#: Rows of one commit at most, and their bytes, about.
MAX_ROWS, MAX_BYTES = 10_000, 32 * 1024 * 1024
#: Attempts are random, so that processes that settle concurrently stage their files apart.
_ATTEMPTS: Final = 2**31 - 1


class Decision(NamedTuple):
    """Holds the inputs of a generation's rows.

    :param batches: The batches whose outcomes count.
    :param only: The batchers whose outcomes count; ``None``: all, and the process task's.
    :param at: The time of the settlement.
    :param own: Whether this call wrote it.
    """

    batches: frozenset[str]
    only: list[str] | None
    at: datetime
    own: bool


def check_table(run: StagedRun, pipeline: Pipeline, connections: Connections) -> None:
    """Checks once per table, by a commit without rows, that the rows of dead letters will fit.

    :raises SinkError: If the table does not exist, lacks a column, or cannot be reached.
    """
    table = pipeline.dead_letter_table
    if table is None:
        return
    digest = sha256(f"{table!r} {COLUMNS}".encode()).hexdigest()[:16]
    folder = run.store.folder(f"{encode_name(run.pipeline)}/_dead_letter_table")
    if not folder.exists(f"{digest}.json"):
        with closing(_Table(pipeline, connections)) as writer:
            try:
                writer.commit(f"check.{uuid.uuid4().hex}", [])
            except SinkError as error:
                columns = ", ".join(COLUMNS.names)
                raise SinkError(f"{error}; its columns must be {columns}") from None
        folder.create(f"{digest}.json", json.dumps({"version": VERSION, "uri": table.uri}))


def fix_decision(
    run: StagedRun, record: GenerationRecord, settlement: Settlement, only: Iterable[str] | None
) -> Decision:
    """Writes the decision on a generation's rows, unless it is written; returns the valid one."""
    path = paths.dead_letters(record.generation)
    own = {"batches": sorted(settlement.batches), "only": None if only is None else sorted(only)}
    created = run.create_once(path, settling_record(run, record, **own))
    value = json.loads(run.read_once(path))
    check_version(value, path)
    at = datetime.fromisoformat(value["at"])
    return Decision(frozenset(value["batches"]), value["only"], at, created)


def commit_rows_of(
    run: StagedRun,
    record: GenerationRecord,
    pipeline: Pipeline,
    letters: Iterator[DeadLettered],
    at: datetime,
    connections: Connections,
) -> None:
    """Commits the rows of a generation's dead letters; idempotent, also when called concurrently.

    :raises SinkError: If the table cannot be reached or written; call it again.
    """
    manifest = run.manifest(record.generation)
    common = {
        "settled_at": at,
        "pipeline": run.pipeline,
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "generation": record.generation,
    }
    files = [] if manifest is None else manifest.received_files
    count = 0
    with closing(_Table(pipeline, connections)) as writer:
        rows = _rows(run, files, letters, common)
        for number, part in enumerate(_parts(rows, lambda row: row["payload"])):
            writer.commit(f"{record.generation}.{number:05d}", part)
            count += len(part)
    log.info("%s: rows of %s.", writer.uri, pluralize(count, "dead letter"))


class _Table:
    """The open table of a pipeline; errors name the option, and what follows from them."""

    def __init__(self, pipeline: Pipeline, connections: Connections) -> None:
        table: Any = pipeline.dead_letter_table
        self.uri = table.uri
        self._pipeline = pipeline
        with self._translated():
            self._client: SinkClient = table.open(SinkEnv(connections=connections))

    def commit(self, commit_id: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Commits rows under an id that no other rows have."""
        columns = [pa.array([row[f.name] for row in rows], f.type) for f in COLUMNS]
        table = pa.Table.from_arrays(columns, schema=COLUMNS)
        info = BatchInfo("", None, None, len(rows), Trigger.SIZE, commit_id)
        attempt = 1 + secrets.randbelow(_ATTEMPTS)
        commit = Commit(
            commit_id=commit_id, attempt=attempt, batch=info, pipeline=self._pipeline.name
        )
        with self._translated():
            try:
                self._client.commit(table, commit)
            except CommitRefused:
                if not self._client.landed([commit_id]):
                    raise

    def close(self) -> None:
        """Releases connections."""
        self._client.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # The commit may have landed all the same: then a later one of its id is refused.
            reason = str(error) if isinstance(error, SinkError) else reason_of(error)
            raise SinkError(
                f"the dead-letter table {self.uri} cannot be written: {reason}.  No dead letter"
                " is settled before its row is committed; see docs/dead-letters.md"
            ) from error


def _rows(
    run: StagedRun, files: Sequence[str], letters: Iterator[DeadLettered], common: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields the rows in order of their letters' parts; memory holds one part of the letters."""
    seen: set[str] = set()
    for part in _parts(letters, lambda letter: letter[0].payload):
        by_id = {plain_text(letter[0].message_id): letter for letter in part}
        for key in seen & by_id.keys():
            del by_id[key]
        seen |= by_id.keys()
        for received in received_rows(run, files, by_id):
            if received["message_id"] in by_id:
                yield _row(by_id.pop(received["message_id"]), received, common)
        for letter in by_id.values():
            yield _row(letter, {}, common)


def _row(
    letter: DeadLettered, received: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, Any]:
    entry, batcher, batch_id = letter
    verdict = entry.verdict
    payload = received.get("payload") if entry.payload is None else entry.payload
    return {
        "message_id": plain_text(entry.message_id),
        "payload": payload,
        "payload_text": _decoded(payload),
        "reason": plain_text(verdict.reason),
        "stage": verdict.stage,
        "exception": plain_text(verdict.exception) or None,
        "attempt": entry.attempt,
        "batcher": batcher or None,
        "batch_id": batch_id or None,
        "enqueued_at": received.get("enqueued_at"),
        "received_at": received.get("received_at"),
        **common,
    }


def _decoded(payload: bytes | None) -> str | None:
    """Returns a payload as text; ``None`` if it is not UTF-8, or has NUL, which is no text."""
    if payload is None or b"\0" in payload:
        return None
    try:
        return payload.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _parts(
    items: Iterable[T], payload_of: Callable[[T], bytes | bytearray | None]
) -> Iterator[list[T]]:
    """Splits letters or rows by count and bytes of payloads; the same ones are split alike."""
    part: list[T] = []
    size = 0
    for item in items:
        part.append(item)
        size += len(payload_of(item) or b"")
        if len(part) >= MAX_ROWS or size >= MAX_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
