"""An archive and files that users have: Parquet, JSON lines and CSV, in and out."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.staging.archive.layout import (
    BEGUN,
    COLUMNS,
    Index,
    index_path,
    partition_of,
    put_index,
)
from airflow_broadway.staging.archive.reader import look, tables
from airflow_broadway.staging.archive.writer import by_hour, id_column
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import TableFiles, instants

#: By what a file's name ends in.
FORMATS: Final = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
#: Rows that are read at a time, and hours whose files are open at a time.
_ROWS: Final = 16_384
_OPEN: Final = 32
#: Text that says seconds; of 4, 6, 8 or 12 digits it is a year, a month, a day or a minute.
_SECONDS: Final = re.compile(r"(?!([0-9]{4}|[0-9]{6}|[0-9]{8}|[0-9]{12})$)-?[0-9]+(\.[0-9]+)?")


class Chosen(NamedTuple):
    """Which column is what.

    :param time: When a message is to lie: an instant, ISO 8601 text, or seconds from 1970.
    :param payload: What callbacks get as ``data``, as bytes; without one, the row as JSON.
    :param id: Unique in the archive; without one, made of the file and the row's number.
    """

    time: str
    payload: str | None = None
    id: str | None = None


class Imported(NamedTuple):
    """What was imported; ``before``: it had been already, and nothing was changed."""

    generation: str
    messages: int
    before: bool = False


def import_file(
    archive: Folder, path: Path, chosen: Chosen, now: datetime, kind: str = ""
) -> Imported:
    """Put a file's rows into the archive, all at once; the same file twice is there once.

    :param kind: ``"parquet"``, ``"jsonl"`` or ``"csv"``; by the file's name unless given.
    :raises RequestRefused: If its columns do not fit: nothing is imported then.
    :raises StagingError: If the archive cannot be written.
    """
    kind = kind or FORMATS.get(path.suffix.lower(), "")
    if kind not in _READERS:
        raise RequestRefused(
            f"{path} ends in none of {sorted(FORMATS)}: say with --format what it is"
        )
    generation = _digest(path, chosen)
    if archive.exists(index_path(generation)):
        return Imported(generation, 0, before=True)
    files: dict[int, TableFiles] = {}
    counts: dict[str, int] = {}
    hours: set[int] = set()
    count = 0
    rows = _READERS[kind](path)
    own = uuid.uuid4().hex[:8]
    try:
        while part := list(islice(rows, _ROWS)):
            table = _table(part, chosen, count, generation, str(path), now)
            count += len(part)
            for hour, piece in by_hour(table):
                hours.add(hour)
                if hour not in files and len(files) >= _OPEN:
                    _close(files)
                stem = f"{partition_of(hour)}/{generation}-{own}-{count:08d}"
                target = files.setdefault(hour, TableFiles(archive, stem, COLUMNS))
                name = target.paths[target.write([piece])]
                counts[name] = counts.get(name, 0) + piece.num_rows
        _close(files)
    finally:
        for each in files.values():
            each.abort()
    if not count:
        raise RequestRefused(f"{path} has no rows: nothing was imported")
    if not archive.exists(BEGUN):
        archive.create(BEGUN, json.dumps({"version": 1, "since": now.isoformat()}))
    name, at = f"import {path.name}", now.isoformat()
    index = Index(generation=generation, dag_id="", run_id=name, files=counts, at=at)
    put_index(archive, index, hours)
    return Imported(generation, count)


def _close(files: dict[int, TableFiles]) -> None:
    for each in files.values():
        each.close()
    files.clear()


def _digest(path: Path, chosen: Chosen) -> str:
    found = hashlib.sha256(f"{chosen.time} {chosen.payload} {chosen.id}\n".encode())
    try:
        with path.open("rb") as file:
            while block := file.read(1024 * 1024):
                found.update(block)
    except OSError as error:
        raise RequestRefused(f"{path} cannot be read: {error.strerror or error}") from None
    return found.hexdigest()[:32]


# -- rows ------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise RequestRefused(f"{path} is no Parquet file: {error}") from None


@contextmanager
def _text_of(path: Path) -> Iterator[TextIO]:
    """A file of text; what spreadsheets write before its first character is no part of it."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise RequestRefused(
                f"{path} is no text in UTF-8 ({error.reason}): nothing was imported"
            ) from None


def _jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with _text_of(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RequestRefused(f"{path}, line {number}, is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise RequestRefused(f"{path}, line {number}, is no JSON object")
            yield row


def _csv(path: Path) -> Iterator[Mapping[str, Any]]:
    with _text_of(path) as file:
        rows = csv.DictReader(file)
        try:
            twice = [name for name, count in Counter(rows.fieldnames or ()).items() if count > 1]
            if twice:
                raise RequestRefused(
                    f"{path} has more than one column {twice[0]!r}: nothing was imported"
                )
            for number, row in enumerate(rows, 2):
                if None in row or None in row.values():
                    raise RequestRefused(
                        f"{path}, line {number}, has not as many columns as the first"
                    )
                yield row
        except csv.Error as error:
            raise RequestRefused(
                f"{path}, line {rows.line_num + 1}, is no CSV: {error}: nothing was imported"
            ) from None


_READERS: Final[Mapping[str, Callable[[Path], Iterator[Mapping[str, Any]]]]] = {
    "parquet": _parquet,
    "jsonl": _jsonl,
    "csv": _csv,
}


def _table(
    rows: list[Mapping[str, Any]],
    chosen: Chosen,
    first: int,
    generation: str,
    path: str,
    now: datetime,
) -> pa.Table:
    times: list[datetime] = []
    ids: list[str] = []
    payloads: list[bytes] = []
    for number, row in enumerate(rows, first + 1):
        where = f"{path}, row {number}"
        times.append(_time(row, chosen, where))
        own = None if chosen.id is None else _cell(row, chosen.id, where)
        ids.append(f"{generation[:16]}-{number}" if own is None else str(own))
        payloads.append(_payload(row, chosen.payload, where))
    count = len(rows)
    columns: dict[str, Any] = {
        "time": instants(times),
        "message_id": id_column(ids),
        "payload": payloads,
        "form": pa.nulls(count, pa.string()),
        "metadata": pa.repeat("{}", count),
        "received_at": instants([now] * count),
        "enqueued_at": instants([None] * count),
        "batch_key": pa.nulls(count, pa.string()),
        "attempt": [1] * count,
        "redelivered": [False] * count,
        "position": list(range(first, first + count)),
        "size": [len(each) for each in payloads],
        "source": pa.repeat("import", count),
        "was": pa.nulls(count, pa.string()),
    }
    arrays = [
        array_of(column, each.type) if type(column) is list else column
        for each, column in ((each, columns[each.name]) for each in COLUMNS)
    ]
    return pa.Table.from_arrays(arrays, schema=COLUMNS)


def _cell(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise RequestRefused(
            f"{where} has no column {name!r}; it has {sorted(row)}: nothing was imported"
        )
    value = row[name]
    if value is None or value == "":
        raise RequestRefused(f"{where} has nothing in the column {name!r}: nothing was imported")
    return value


def _time(row: Mapping[str, Any], chosen: Chosen, where: str) -> datetime:
    value = _cell(row, chosen.time, where)
    try:
        if isinstance(value, datetime):
            found = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found = datetime.fromtimestamp(value, UTC)
        elif _SECONDS.fullmatch(text := str(value).strip()):
            found = datetime.fromtimestamp(float(text), UTC)
        else:
            found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise RequestRefused(
            f"{where}: {value!r:.80} in the column {chosen.time!r} is no instant: nothing was"
            " imported"
        ) from None


def _payload(row: Mapping[str, Any], name: str | None, where: str) -> bytes:
    value = row if name is None else _cell(row, name, where)
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "surrogatepass")


# -- out -------------------------------------------------------------------------------------------


def export(archive: Folder, interval: Interval, path: Path) -> int:
    """Write an interval to a file, each message once, in order; returns how many there are.

    :raises RequestRefused: If the file is there, or its name does not say what it is to be.
    :raises StagingError: If the archive cannot be read.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind not in ("parquet", "jsonl"):
        raise RequestRefused(f"{path} is to end in .parquet or .jsonl: nothing was written")
    found = tables(archive, look(archive, interval), interval)
    try:
        with path.open("xb") as file:
            count = _write_parquet(found, file) if kind == "parquet" else _write_lines(found, file)
    except FileExistsError:
        raise RequestRefused(f"{path} is there already: nothing was written") from None
    return count


def _write_parquet(found: Iterable[pa.Table], file: Any) -> int:
    count = 0
    with pq.ParquetWriter(file, COLUMNS, compression="zstd") as writer:
        for table in found:
            writer.write_table(table)
            count += table.num_rows
    return count


def _write_lines(found: Iterable[pa.Table], file: Any) -> int:
    count = 0
    for table in found:
        for row in table.to_pylist():
            file.write(json.dumps(line_of(row)).encode() + b"\n")
            count += 1
    return count


def line_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON: what of the payload is no text in UTF-8 stands in ``payload_base64``."""
    made: dict[str, Any] = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in row.items()
        if name != "payload" and value is not None
    }
    made["metadata"] = json.loads(row["metadata"])
    try:
        made["payload"] = row["payload"].decode("utf-8")
    except UnicodeDecodeError:
        made["payload_base64"] = base64.b64encode(row["payload"]).decode("ascii")
    return made
