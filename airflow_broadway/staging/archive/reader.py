"""Reads an interval of an archive in order of time and id, each message once.

The result and its order depend only on the interval and the archive.  Memory holds the messages of
one hour.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats.layout import read_json
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.text import many
from airflow_broadway.staging.archive.layout import (
    AGAIN,
    BEGUN,
    HOURS,
    REMOVED,
    Index,
    digest_of,
    hour_of,
    index_path,
    parsed,
    partition_of,
    start_of,
)
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import TIMESTAMP, ParquetFile

_FILE: Final = re.compile(r"([0-9a-f]{32})-.+\.parquet")
_DATE: Final = re.compile(r"date=(\d{4}-\d\d-\d\d)")
_HOUR: Final = re.compile(r"hour=(\d\d)")
_MARK: Final = re.compile(r"(\d\d)-([0-9a-f]{32})")
_ORDER: Final = [("time", "ascending"), ("message_id", "ascending"), ("received_at", "ascending")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedInterval:
    """The files of an interval in an archive.

    :param hours: Hour → its files that count → their number of messages.
    :param lost: Files that an index names but that do not exist.
    :param untimed: Reason → number of messages without a time of their own, of the executions with
        files in the interval; only the first reason of each execution is recorded.
    """

    hours: Mapping[int, Mapping[str, int]]
    lost: tuple[str, ...] = ()
    untimed: Mapping[str, int] = field(default_factory=dict)

    @property
    def messages(self) -> int:
        """Number of messages in these files; those at the edges may be outside the interval."""
        return sum(sum(files.values()) for files in self.hours.values())


def hours_of(archive: Folder, interval: Interval | None = None) -> Iterator[int]:
    """Yields the hours with a folder or a mark, in order."""
    for hour, _ in _hours(archive, interval):
        yield hour


def generations_in(archive: Folder, hour: int) -> set[str]:
    """Returns the generations that have or had files in an hour."""
    names = archive.list(partition_of(hour))
    marked = {
        generation
        for other, marked in _hours(archive, Interval(start_of(hour), start_of(hour + 1)))
        for generation in marked
        if other == hour
    }
    return marked | {match[1] for match in map(_FILE.fullmatch, names) if match}


def _hours(archive: Folder, interval: Interval | None) -> Iterator[tuple[int, set[str]]]:
    """Yields hours with the generations that have marks in them."""
    first = None if interval is None else hour_of(interval.start)
    last = None if interval is None else _last_hour(interval)
    folders, noted = set(archive.list("")), set(archive.list(HOURS))
    for date in sorted(folders | noted):
        day = _DATE.fullmatch(date)
        if day is None:
            continue
        midnight = hour_of(datetime.fromisoformat(day[1]).replace(tzinfo=UTC))
        if (first is not None and midnight + 23 < first) or (last is not None and midnight > last):
            continue
        by_hour: dict[int, set[str]] = {}
        for match in map(_HOUR.fullmatch, archive.list(date) if date in folders else ()):
            if match:
                by_hour.setdefault(midnight + int(match[1]), set())
        for match in map(_MARK.fullmatch, archive.list(f"{HOURS}/{date}") if date in noted else ()):
            if match:
                by_hour.setdefault(midnight + int(match[1]), set()).add(match[2])
        for hour in sorted(by_hour):
            if (first is None or first <= hour) and (last is None or hour <= last):
                yield hour, by_hour[hour]


def _last_hour(interval: Interval) -> int:
    last = hour_of(interval.end)
    return last - 1 if start_of(last) == interval.end else last


def look(archive: Folder, interval: Interval | None = None) -> ArchivedInterval:
    """Finds the files of an interval, or of the whole archive.

    :raises StagingError: If a newer release wrote the archive, or it cannot be read.
    """
    present: dict[int, set[str]] = {}
    generations: set[str] = set()
    for hour, marked in _hours(archive, interval):
        present[hour] = set(archive.list(partition_of(hour)))
        generations |= marked
        generations.update(match[1] for match in map(_FILE.fullmatch, present[hour]) if match)
    # Concurrently: each read costs a round trip to an object store.
    indexes = list(_read_indexes(archive, sorted(generations)))
    hours: dict[int, dict[str, int]] = {}
    lost: list[str] = []
    named: dict[str, dict[str, int]] = {}
    for index in indexes:
        for path, rows in index.files.items():
            named.setdefault(path.rpartition("/")[0], {})[path] = rows
    for hour, names in present.items():
        files = named.get(partition_of(hour), {})
        there = {path: n for path, n in files.items() if path.rpartition("/")[2] in names}
        lost += sorted(files.keys() - there)
        if there:
            hours[hour] = dict(sorted(there.items()))
    untimed = Counter[str]()
    for index in indexes:
        if index.untimed:
            untimed[index.why] += index.untimed
    return ArchivedInterval(hours=hours, lost=tuple(lost), untimed=dict(untimed))


def _read_indexes(archive: Folder, generations: Sequence[str]) -> Iterator[Index]:
    """Reads the indexes of generations, except of unsettled ones, which have none."""
    for path, text in archive.read_all([index_path(generation) for generation in generations]):
        if text is not None:
            yield Index.loads(text, f"{archive.path}/{path}")


def read_index(archive: Folder, generation: str) -> Index | None:
    """Reads the index of a generation; ``None`` if there is none.

    :raises StagingError: If a newer release wrote it, or it is damaged.
    """
    path = index_path(generation)
    try:
        return Index.loads(archive.read(path), f"{archive.path}/{path}")
    except FileNotFoundError:
        return None


def begun_at(archive: Folder) -> datetime | None:
    """Returns the time at which the archive was begun; ``None`` if it is empty."""
    try:
        return parsed(read_json(archive.read(BEGUN), f"{archive.path}/{BEGUN}"), "since")
    except FileNotFoundError:
        return None


def removed_in(archive: Folder, interval: Interval) -> bool:
    """Whether any part of an interval was removed, by retention or by hand."""
    for _, text in archive.read_all([f"{REMOVED}/{name}" for name in archive.list(REMOVED)]):
        value: dict[str, Any] = json.loads(text or "{}")
        if (
            value
            and parsed(value, "start") < interval.end
            and interval.start < parsed(value, "end")
        ):
            return True
    return False


# -- messages --------------------------------------------------------------------------------------


def tables(archive: Folder, contents: ArchivedInterval, interval: Interval) -> Iterator[pa.Table]:
    """Yields the messages of an interval in order, one table per hour.

    :raises StagingError: If a file cannot be read, or does not match its index.
    """
    repeated = _redelivered_ids(archive, contents) if len(contents.hours) > 1 else frozenset()
    again = _read_again(archive)
    seen: set[str] = set()
    for hour in sorted(contents.hours):
        table = _clip(_read_hour(archive, contents.hours[hour]), interval)
        table = _drop_duplicates(table.take(pc.sort_indices(table, sort_keys=_ORDER)))
        if again:
            table = _drop_again(table, again)
        if repeated:
            table = _drop_seen(table, repeated, seen)
        if table.num_rows:
            yield table


def _read_hour(archive: Folder, files: Mapping[str, int]) -> pa.Table:
    parts: list[pa.Table] = []
    for path, rows in sorted(files.items()):
        groups = list(_groups(archive, path))
        if sum(group.num_rows for group in groups) != rows:
            raise StagingError(
                f"{archive.path}/{path} does not hold the {many(rows, 'message')} that its index"
                " names: nothing of the interval is handled; restore the file, or purge its hour"
            )
        parts += groups
    return pa.concat_tables(parts).combine_chunks()


def _groups(archive: Folder, path: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    try:
        with ParquetFile(archive, path) as file:
            for group in range(file.groups):
                yield file.read(group, columns)
    except FileNotFoundError:
        raise StagingError(
            f"{archive.path}/{path} was removed while the interval was read: run it again"
        ) from None


def _clip(table: pa.Table, interval: Interval) -> pa.Table:
    start, end = (pa.scalar(bound.astimezone(UTC), TIMESTAMP) for bound in interval)
    times = table["time"]
    return table.filter(pc.and_(pc.greater_equal(times, start), pc.less(times, end)))


def _drop_duplicates(table: pa.Table) -> pa.Table:
    """Drops rows whose id an earlier row has."""
    ids = table["message_id"]
    if pc.count_distinct(ids).as_py() == table.num_rows:
        return table
    seen: set[Any] = set()
    kept: list[bool] = []
    for message_id in ids.to_pylist():
        kept.append(message_id not in seen)
        seen.add(message_id)
    return table.filter(array_of(kept, pa.bool_()))


def _read_again(archive: Folder) -> Mapping[str, set[str]]:
    """Reads the dead letters that were requeued under another id: id → digests of payloads."""
    named: dict[str, set[str]] = {}
    for name in archive.list(AGAIN):
        index, path = read_index(archive, name.partition("-")[0]), f"{AGAIN}/{name}"
        if index is None or index.again != path:
            continue
        there: dict[str, bool] = {}
        with suppress(FileNotFoundError):  # removed meanwhile, together with its messages
            for line in archive.read(path).splitlines():
                message_id, digest, file = json.loads(line)
                if file not in there:
                    there[file] = archive.exists(file)
                if there[file]:  # in a removed hour there is no second copy
                    named.setdefault(message_id, set()).add(digest)
    return named


def _drop_again(table: pa.Table, again: Mapping[str, set[str]]) -> pa.Table:
    """Drops rows that are there again under another id.

    A sender can forge the former id of a message, so the payload must be equal too.
    """
    ids: list[Any] = table["message_id"].to_pylist()
    kept = [
        message_id not in again or digest_of(table["payload"][row].as_py()) not in again[message_id]
        for row, message_id in enumerate(ids)
    ]
    return table if all(kept) else table.filter(array_of(kept, pa.bool_()))


def _redelivered_ids(archive: Folder, contents: ArchivedInterval) -> frozenset[str]:
    """Returns the ids that may be in several hours: those of redelivered messages."""
    ids: set[Any] = set()
    for files in contents.hours.values():
        for path in files:
            for table in _groups(archive, path, ["message_id", "redelivered", "attempt"]):
                again = pc.or_(table["redelivered"], pc.greater(table["attempt"], 1))
                ids.update(table["message_id"].filter(again).to_pylist())
    return frozenset(ids)


def _drop_seen(table: pa.Table, repeated: frozenset[str], seen: set[str]) -> pa.Table:
    is_seen = pc.is_in(table["message_id"], value_set=array_of(sorted(seen), pa.string()))
    table = table.filter(pc.invert(is_seen)) if seen else table
    seen.update(repeated.intersection(table["message_id"].to_pylist()))
    return table
