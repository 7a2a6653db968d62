"""Read an interval of an archive: in order of time and id, each message once.

What comes out, and in which order, is a function of the interval and of the archive alone.  Memory
holds the messages of one hour.
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
from airflow_broadway.staging.tables import INSTANT, ParquetFile

_FILE: Final = re.compile(r"([0-9a-f]{32})-.+\.parquet")
_DATE: Final = re.compile(r"date=(\d{4}-\d\d-\d\d)")
_HOUR: Final = re.compile(r"hour=(\d\d)")
_MARK: Final = re.compile(r"(\d\d)-([0-9a-f]{32})")
_ORDER: Final = [("time", "ascending"), ("message_id", "ascending"), ("received_at", "ascending")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an archive has of an interval.

    :param hours: For each hour that has messages, the files that count, with their messages.
    :param lost: Files that an index names, and that are not there.
    :param untimed: How many messages of the executions that it touches gave no time of their own,
        by why, of the first of each.
    """

    hours: Mapping[int, Mapping[str, int]]
    lost: tuple[str, ...] = ()
    untimed: Mapping[str, int] = field(default_factory=dict)

    @property
    def messages(self) -> int:
        """Messages in these files; those at the edges may lie outside of the interval."""
        return sum(sum(files.values()) for files in self.hours.values())


def hours_of(archive: Folder, interval: Interval | None = None) -> Iterator[int]:
    """The hours that have a folder, or had one that somebody else has removed, in order."""
    for hour, _ in _hours(archive, interval):
        yield hour


def generations_in(archive: Folder, hour: int) -> set[str]:
    """The generations that have, or had, files in an hour."""
    names = archive.list(partition_of(hour))
    marked = {
        generation
        for each, found in _hours(archive, Interval(start_of(hour), start_of(hour + 1)))
        for generation in found
        if each == hour
    }
    return marked | {match[1] for match in map(_FILE.fullmatch, names) if match}


def _hours(archive: Folder, interval: Interval | None) -> Iterator[tuple[int, set[str]]]:
    """Hours, and the generations that are noted to have a file in each."""
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
        found: dict[int, set[str]] = {}
        for match in map(_HOUR.fullmatch, archive.list(date) if date in folders else ()):
            if match:
                found.setdefault(midnight + int(match[1]), set())
        for match in map(_MARK.fullmatch, archive.list(f"{HOURS}/{date}") if date in noted else ()):
            if match:
                found.setdefault(midnight + int(match[1]), set()).add(match[2])
        for hour in sorted(found):
            if (first is None or first <= hour) and (last is None or hour <= last):
                yield hour, found[hour]


def _last_hour(interval: Interval) -> int:
    last = hour_of(interval.end)
    return last - 1 if start_of(last) == interval.end else last


def look(archive: Folder, interval: Interval | None = None) -> Found:
    """What there is of an interval, or in all.

    :raises StagingError: If a newer release wrote it, or it cannot be read.
    """
    present: dict[int, set[str]] = {}
    generations: set[str] = set()
    for hour, marked in _hours(archive, interval):
        present[hour] = set(archive.list(partition_of(hour)))
        generations |= marked
        generations.update(match[1] for match in map(_FILE.fullmatch, present[hour]) if match)
    # Many at a time: each costs a round trip to an object store.
    indexes = list(_indexes(archive, sorted(generations)))
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
    return Found(hours=hours, lost=tuple(lost), untimed=dict(untimed))


def _indexes(archive: Folder, generations: Sequence[str]) -> Iterator[Index]:
    """What counts of some generations; those that are not settled have no index."""
    for path, text in archive.read_all([index_path(each) for each in generations]):
        if text is not None:
            yield Index.loads(text, f"{archive.path}/{path}")


def read_index(archive: Folder, generation: str) -> Index | None:
    """What counts of a generation; ``None`` if it is not settled, or nothing of it counts.

    :raises StagingError: If a newer release wrote it, or it is damaged.
    """
    path = index_path(generation)
    try:
        return Index.loads(archive.read(path), f"{archive.path}/{path}")
    except FileNotFoundError:
        return None


def begun_at(archive: Folder) -> datetime | None:
    """Since when messages are kept; ``None`` if none was ever."""
    try:
        return parsed(read_json(archive.read(BEGUN), f"{archive.path}/{BEGUN}"), "since")
    except FileNotFoundError:
        return None


def removed_in(archive: Folder, interval: Interval) -> bool:
    """Whether retention, or somebody, has removed any of an interval."""
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


def tables(archive: Folder, found: Found, interval: Interval) -> Iterator[pa.Table]:
    """The messages of an interval, in order; a table an hour.

    :raises StagingError: If a file cannot be read, or does not hold what its index says.
    """
    repeated = _repeated(archive, found) if len(found.hours) > 1 else frozenset()
    again = _again(archive)
    seen: set[str] = set()
    for hour in sorted(found.hours):
        table = _within(_hour(archive, found.hours[hour]), interval)
        table = _first_of_each(table.take(pc.sort_indices(table, sort_keys=_ORDER)))
        if again:
            table = _without(table, again)
        if repeated:
            table = _unseen(table, repeated, seen)
        if table.num_rows:
            yield table


def _hour(archive: Folder, files: Mapping[str, int]) -> pa.Table:
    parts: list[pa.Table] = []
    for path, rows in sorted(files.items()):
        found = list(_groups(archive, path))
        if sum(each.num_rows for each in found) != rows:
            raise StagingError(
                f"{archive.path}/{path} does not hold the {many(rows, 'message')} that its index"
                " names: nothing of the interval is handled; restore the file, or purge its hour"
            )
        parts += found
    # An earlier release had fewer columns.
    return pa.concat_tables(parts, promote_options="default").combine_chunks()


def _groups(archive: Folder, path: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    try:
        with ParquetFile(archive, path) as file:
            for group in range(file.groups):
                yield file.read(group, columns)
    except FileNotFoundError:
        raise StagingError(
            f"{archive.path}/{path} was removed while the interval was read: run it again"
        ) from None


def _within(table: pa.Table, interval: Interval) -> pa.Table:
    start, end = (pa.scalar(each.astimezone(UTC), INSTANT) for each in interval)
    times = table["time"]
    return table.filter(pc.and_(pc.greater_equal(times, start), pc.less(times, end)))


def _first_of_each(table: pa.Table) -> pa.Table:
    """The rows without ids that an earlier row has."""
    ids = table["message_id"]
    if pc.count_distinct(ids).as_py() == table.num_rows:
        return table
    seen: set[Any] = set()
    kept: list[bool] = []
    for each in ids.to_pylist():
        kept.append(each not in seen)
        seen.add(each)
    return table.filter(array_of(kept, pa.bool_()))


def _again(archive: Folder) -> Mapping[str, set[str]]:
    """The dead letters that are there once more with another id: id → digests of payloads."""
    named: dict[str, set[str]] = {}
    for name in archive.list(AGAIN):
        index, path = read_index(archive, name.partition("-")[0]), f"{AGAIN}/{name}"
        if index is None or index.again != path:
            continue
        there: dict[str, bool] = {}
        with suppress(FileNotFoundError):  # removed just now, with all that it tells of
            for line in archive.read(path).splitlines():
                message_id, digest, *files = json.loads(line)  # an earlier release named no file
                for each in files:
                    if each not in there:
                        there[each] = archive.exists(each)
                # Of an hour that was removed it is not there once more.
                if all(there[each] for each in files):
                    named.setdefault(message_id, set()).add(digest)
    return named


def _without(table: pa.Table, again: Mapping[str, set[str]]) -> pa.Table:
    """The rows that are not there once more.

    Anybody who may send can say that his message was another: so it has to be the same, too.
    """
    ids: list[Any] = table["message_id"].to_pylist()
    kept = [
        each not in again or digest_of(table["payload"][row].as_py()) not in again[each]
        for row, each in enumerate(ids)
    ]
    return table if all(kept) else table.filter(array_of(kept, pa.bool_()))


def _repeated(archive: Folder, found: Found) -> frozenset[str]:
    """The ids that may be in several hours: those of messages that were delivered again."""
    ids: set[Any] = set()
    for files in found.hours.values():
        for path in files:
            for table in _groups(archive, path, ["message_id", "redelivered", "attempt"]):
                again = pc.or_(table["redelivered"], pc.greater(table["attempt"], 1))
                ids.update(table["message_id"].filter(again).to_pylist())
    return frozenset(ids)


def _unseen(table: pa.Table, repeated: frozenset[str], seen: set[str]) -> pa.Table:
    known = pc.is_in(table["message_id"], value_set=array_of(sorted(seen), pa.string()))
    table = table.filter(pc.invert(known)) if seen else table
    seen.update(repeated.intersection(table["message_id"].to_pylist()))
    return table
