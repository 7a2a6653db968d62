"""Imports Parquet, JSON lines and CSV files into an archive, and exports intervals."""

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
from airflow_broadway.staging.arrow_schema import table_of_columns
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import TableFiles, timestamps

#: File name extension → format.
FORMATS: Final = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}
#: Rows read at a time, and maximum number of hours with an open file.
_ROWS: Final = 16_384
_OPEN: Final = 32
#: Text of seconds; with 4, 6, 8 or 12 digits it is a year, a month, a day or a minute.
_SECONDS: Final = re.compile(r"(?!([0-9]{4}|[0-9]{6}|[0-9]{8}|[0-9]{12})$)-?[0-9]+(\.[0-9]+)?")


class Chosen(NamedTuple):
    """The columns of a file to import.

    :param time: The time of a message: a timestamp, ISO 8601 text, or seconds from 1970.
    :param payload: The ``data`` for callbacks, as bytes; default: the row as JSON.
    :param id: An id that is unique in the archive; default: derived from file and row number.
    """

    time: str
    payload: str | None = None
    id: str | None = None


class Imported(NamedTuple):
    """The result of an import; ``before`` if the file had been imported already."""

    generation: str
    messages: int
    before: bool = False


def import_file(
    archive: Folder, path: Path, chosen: Chosen, now: datetime, kind: str = ""
) -> Imported:
    """Imports a file's rows into the archive atomically; idempotent for the same file.

    :param kind: ``"parquet"``, ``"jsonl"`` or ``"csv"``; default: by the file's name.
    :raises RequestRefused: If its columns do not fit: nothing is imported then.
    :raises StagingError: If the archive cannot be written.
    """
    kind = kind or FORMATS.get(path.suffix.lower(), "")
    if kind not in _READERS:
        raise RequestRefused(
            f"{path} ends in none of {sorted(FORMATS)}: set its format with --format"
        )
    generation = _file_digest(path, chosen)
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
                    _close_all(files)
                stem = f"{partition_of(hour)}/{generation}-{own}-{count:08d}"
                target = files.setdefault(hour, TableFiles(archive, stem, COLUMNS))
                name = target.paths[target.write([piece])]
                counts[name] = counts.get(name, 0) + piece.num_rows
        _close_all(files)
    finally:
        for table_files in files.values():
            table_files.abort()
    if not count:
        raise RequestRefused(f"{path} has no rows: nothing was imported")
    if not archive.exists(BEGUN):
        archive.create(BEGUN, json.dumps({"version": 1, "since": now.isoformat()}))
    name, at = f"import {path.name}", now.isoformat()
    index = Index(generation=generation, dag_id="", run_id=name, files=counts, at=at)
    put_index(archive, index, hours)
    return Imported(generation, count)


def _close_all(files: dict[int, TableFiles]) -> None:
    for table_files in files.values():
        table_files.close()
    files.clear()


def _file_digest(path: Path, chosen: Chosen) -> str:
    digest = hashlib.sha256(f"{chosen.time} {chosen.payload} {chosen.id}\n".encode())
    try:
        with path.open("rb") as file:
            while block := file.read(1024 * 1024):
                digest.update(block)
    except OSError as error:
        raise RequestRefused(f"{path} cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()[:32]


# -- rows ------------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise RequestRefused(f"{path} is no Parquet file: {error}") from None


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """Opens a text file without the byte order mark of spreadsheets."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise RequestRefused(
                f"{path} is no text in UTF-8 ({error.reason}): nothing was imported"
            ) from None


def _read_jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise RequestRefused(f"{path}, line {number}, is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise RequestRefused(f"{path}, line {number}, is no JSON object")
            yield row


def _read_csv(path: Path) -> Iterator[Mapping[str, Any]]:
    with _open_text(path) as file:
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
    "parquet": _read_parquet,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
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
        "time": timestamps(times),
        "message_id": id_column(ids),
        "payload": payloads,
        "form": pa.nulls(count, pa.string()),
        "metadata": pa.repeat("{}", count),
        "received_at": timestamps([now] * count),
        "enqueued_at": timestamps([None] * count),
        "batch_key": pa.nulls(count, pa.string()),
        "attempt": [1] * count,
        "redelivered": [False] * count,
        "position": list(range(first, first + count)),
        "size": [len(payload) for payload in payloads],
        "source": pa.repeat("import", count),
        "was": pa.nulls(count, pa.string()),
    }
    return table_of_columns(columns, COLUMNS)


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
            time = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            time = datetime.fromtimestamp(value, UTC)
        elif _SECONDS.fullmatch(text := str(value).strip()):
            time = datetime.fromtimestamp(float(text), UTC)
        else:
            time = datetime.fromisoformat(text)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise RequestRefused(
            f"{where}: {value!r:.80} in the column {chosen.time!r} is not a timestamp: nothing"
            " was imported"
        ) from None


def _payload(row: Mapping[str, Any], name: str | None, where: str) -> bytes:
    value = row if name is None else _cell(row, name, where)
    if isinstance(value, bytes):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "surrogatepass")


# -- out -------------------------------------------------------------------------------------------


def export(archive: Folder, interval: Interval, path: Path) -> int:
    """Writes an interval to a file, each message once, in order; returns their number.

    :raises RequestRefused: If the file exists, or its name has no known extension.
    :raises StagingError: If the archive cannot be read.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind not in ("parquet", "jsonl"):
        raise RequestRefused(f"{path} must end in .parquet or .jsonl: nothing was written")
    parts = tables(archive, look(archive, interval), interval)
    try:
        with path.open("xb") as file:
            count = _write_parquet(parts, file) if kind == "parquet" else _write_lines(parts, file)
    except FileExistsError:
        raise RequestRefused(f"{path} exists already: nothing was written") from None
    return count


def _write_parquet(parts: Iterable[pa.Table], file: Any) -> int:
    count = 0
    with pq.ParquetWriter(file, COLUMNS, compression="zstd") as writer:
        for table in parts:
            writer.write_table(table)
            count += table.num_rows
    return count


def _write_lines(parts: Iterable[pa.Table], file: Any) -> int:
    count = 0
    for table in parts:
        for row in table.to_pylist():
            file.write(json.dumps(line_of(row)).encode() + b"\n")
            count += 1
    return count


def line_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row to JSON; a payload that is not UTF-8 text is in ``payload_base64``."""
    line: dict[str, Any] = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in row.items()
        if name != "payload" and value is not None
    }
    line["metadata"] = json.loads(row["metadata"])
    try:
        line["payload"] = row["payload"].decode("utf-8")
    except UnicodeDecodeError:
        line["payload_base64"] = base64.b64encode(row["payload"]).decode("ascii")
    return line
