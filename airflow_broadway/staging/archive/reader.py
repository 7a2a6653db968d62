"""Reads an interval of an archive in order of time and id, each message once.

The result and its order depend only on the interval and the archive.  Memory holds the messages of
one hour.  Files are found by the table's log, and read by staging's own client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.model.pipeline_options import Archive
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.text import pluralize
from airflow_broadway.staging.archive.table import (
    COLUMNS,
    digest_of,
    files_by_hour,
    hour_of,
    open_table,
    removed_intervals,
    start_of,
)
from airflow_broadway.staging.arrow_schema import array_of
from airflow_broadway.staging.arrow_schema import compute as pc
from airflow_broadway.staging.store import Folder
from airflow_broadway.staging.tables import TIMESTAMP, ParquetFile

_ORDER: Final = [("time", "ascending"), ("message_id", "ascending"), ("received_at", "ascending")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedInterval:
    """The files of an interval in an archive, as of one version of its table.

    :param hours: Hour → its files → their number of messages.
    :param lost: Files of the interval that do not exist.
    :param untimed: Reason → number of messages without a time of their own; only the first reason
        of each execution is recorded.
    :param again: Files, of any hour, with dead letters that were requeued under another id.
    :param begun: The time at which the archive was begun; ``None`` if it was not.
    :param removed: Intervals that were removed, by retention or by hand.
    """

    hours: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    untimed: Mapping[str, int] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    begun: datetime | None = None
    removed: tuple[Interval, ...] = ()

    @property
    def messages(self) -> int:
        """Number of messages in these files; those at the edges may be outside the interval."""
        return sum(sum(files.values()) for files in self.hours.values())

    def gaps(self, interval: Interval, options: Archive, now: datetime) -> list[str]:
        """Lists the known gaps of the interval, one sentence each.

        An hour without messages is not a gap, since a queue may be idle.
        """
        if self.begun is None:
            return ["nothing was archived yet: messages are, once a run has settled them"]
        gaps: list[str] = []
        # For another time field it is unknown when the last message of an interval arrives.
        by_arrival = options.time in ("received_at", "enqueued_at")
        if not self.hours:
            gaps.append("nothing is archived of it")
        if options.time == "received_at" and interval.start < self.begun:
            gaps.append(f"the archive was begun only at {self.begun.isoformat()}")
        if by_arrival and interval.end > now:
            gaps.append(f"it is not over yet: it ends at {interval.end.isoformat()}")
        if any(span.start < interval.end and interval.start < span.end for span in self.removed):
            gaps.append("some of it was removed, by retention or by hand")
        if self.lost:
            gaps.append(f"it lacks {pluralize(len(self.lost), 'file')}, such as {self.lost[0]}")
        return gaps

    def remarks(self) -> Sequence[str]:
        """Lists remarks about the archived messages, as sentences."""
        return [
            f"{pluralize(count, 'message')} of its hours had no time, and were archived by their"
            f" time of receipt: {reason}"
            for reason, count in self.untimed.items()
        ]


def look(archive: Folder, interval: Interval | None = None) -> ArchivedInterval:
    """Finds the files of an interval, or of the whole archive.

    :raises StagingError: If a newer release wrote the archive, or it cannot be read.
    """
    table = open_table(archive)
    if table is None:
        return ArchivedInterval()
    hours: dict[int, dict[str, int]] = {}
    lost: list[str] = []
    again: list[str] = []
    untimed = Counter[str]()
    first, last = (0, 0) if interval is None else (hour_of(interval.start), _end_of(interval))
    for hour, files in sorted(files_by_hour(table).items()):
        again += [file["path"] for file in files if _has_values(file, "was")]
        if interval and not first <= hour < last:
            continue
        present = _present(archive, [file["path"] for file in files])
        for file in sorted(files, key=lambda file: str(file["path"])):
            path = file["path"]
            if path not in present:
                lost.append(f"{archive.path}/{path}")
                continue
            hours.setdefault(hour, {})[path] = file["num_records"] or 0
            if _has_values(file, "untimed"):
                for part in _groups(archive, path, ["untimed"]):
                    untimed.update(map(str, part["untimed"].drop_null().to_pylist()))
    return ArchivedInterval(
        hours=hours,
        lost=tuple(lost),
        untimed=dict(untimed),
        again=tuple(path for path in again if archive.exists(path)),
        begun=datetime.fromtimestamp(table.metadata().created_time / 1000, UTC),
        removed=tuple(removed_intervals(table)),
    )


def _end_of(interval: Interval) -> int:
    """Returns the hour after the last one of the interval."""
    last = hour_of(interval.end)
    return last if start_of(last) == interval.end else last + 1


def _present(archive: Folder, paths: Collection[str]) -> set[str]:
    """Returns those of the paths that exist, by a listing of each folder."""
    folders = {path.rpartition("/")[0] for path in paths}
    return {f"{folder}/{name}" for folder in folders for name in archive.list(folder)}


def _has_values(file: Mapping[str, Any], column: str) -> bool:
    nulls = file.get(f"null_count.{column}")  # None: its writer did not count them
    return nulls is None or nulls != file["num_records"]


# -- messages --------------------------------------------------------------------------------------


def tables(archive: Folder, contents: ArchivedInterval, interval: Interval) -> Iterator[pa.Table]:
    """Yields the messages of an interval in order, one table per hour.

    :raises StagingError: If a file cannot be read, or does not match the log.
    """
    repeated = _redelivered_ids(archive, contents) if len(contents.hours) > 1 else frozenset()
    again = _read_again(archive, contents.again)
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
        groups = list(_groups(archive, path, COLUMNS.names))
        if sum(group.num_rows for group in groups) != rows:
            raise StagingError(
                f"{archive.path}/{path} does not hold the {pluralize(rows, 'message')} of the"
                " archive's log: nothing of the interval is handled; restore the file, or purge its"
                " hour"
            )
        parts += groups
    return pa.concat_tables(parts).combine_chunks()


def _groups(archive: Folder, path: str, columns: list[str]) -> Iterator[pa.Table]:
    try:
        with ParquetFile(archive, path) as file:
            for group in range(file.groups):
                yield _conform(file.read(group, [n for n in columns if n in file.columns]), columns)
    except FileNotFoundError:
        raise StagingError(
            f"{archive.path}/{path} was removed while the interval was read: run it again"
        ) from None


def _conform(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Returns a table of any writer with these columns, in the archive's types."""
    for name in set(columns) - set(table.column_names):
        table = table.append_column(name, pa.nulls(table.num_rows, COLUMNS.field(name).type))
    return table.select(columns).cast(pa.schema([COLUMNS.field(name) for name in columns]))


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
    mask: list[bool] = []
    for message_id in ids.to_pylist():
        mask.append(message_id not in seen)
        seen.add(message_id)
    return table.filter(array_of(mask, pa.bool_()))


def _read_again(archive: Folder, paths: Collection[str]) -> Mapping[str, set[str]]:
    """Reads the dead letters that were requeued under another id: id → digests of payloads."""
    named: dict[str, set[str]] = {}
    for path in paths:
        for table in _groups(archive, path, ["was", "payload"]):
            for row in table.filter(pc.is_valid(table["was"])).to_pylist():
                named.setdefault(row["was"], set()).add(digest_of(row["payload"]))
    return named


def _drop_again(table: pa.Table, again: Mapping[str, set[str]]) -> pa.Table:
    """Drops rows that are there again under another id.

    A sender can forge the former id of a message, so the payload must be equal too.
    """
    ids: list[Any] = table["message_id"].to_pylist()
    mask = [
        message_id not in again or digest_of(table["payload"][row].as_py()) not in again[message_id]
        for row, message_id in enumerate(ids)
    ]
    return table if all(mask) else table.filter(array_of(mask, pa.bool_()))


def _redelivered_ids(archive: Folder, contents: ArchivedInterval) -> frozenset[str]:
    """Returns the ids that may be in several hours: those of redelivered messages."""
    ids: set[Any] = set()
    for files in contents.hours.values():
        for path in files:
            for table in _groups(archive, path, ["message_id", "redelivered", "attempt"]):
                again = pc.or_kleene(table["redelivered"], pc.greater(table["attempt"], 1))
                ids.update(table["message_id"].filter(again).to_pylist())
    return frozenset(ids)


def _drop_seen(table: pa.Table, repeated: frozenset[str], seen: set[str]) -> pa.Table:
    is_seen = pc.is_in(table["message_id"], value_set=array_of(sorted(seen), pa.string()))
    table = table.filter(pc.invert(is_seen)) if seen else table
    seen.update(repeated.intersection(table["message_id"].to_pylist()))
    return table
