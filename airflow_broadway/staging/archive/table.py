"""The Delta Lake table of an archive, partitioned by date and hour (UTC) of the messages.

::

    <root>/<pipeline>/_archive/
        _delta_log/                              the table's log: the files that count
        date=2013-01-01/hour=05/*.parquet        messages whose time is in that hour
        _failed/<generation>.jsonl               failed messages of runs without a broker

The messages of one execution are one commit, with the generation as its transaction identifier.
A writer reads the identifier and commits with the same handle, and Delta Lake refuses a commit
whose identifier another one has recorded since: so each generation is there once.  Delta Lake's
own readers and ``VACUUM`` ignore folders that begin with an underscore.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from airflow_broadway.core.errors import RequestRefused, StagingError
from airflow_broadway.core.formats.files import sync_folder
from airflow_broadway.core.formats.layout import VERSION, check_version
from airflow_broadway.core.masking import reason_of
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.staging.client import client_options
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.store import Folder, Store
from airflow_broadway.staging.tables import TIMESTAMP

T = TypeVar("T")

FAILED: Final = "_failed"

#: Microseconds in an hour.
HOUR: Final = 3_600_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST: Final = datetime(1, 1, 1, tzinfo=UTC)

#: Other writers may omit the columns that may be null.
#: ``form`` is the payload's type: null for bytes, "text" for text in UTF-8, "value" for another
#: plain value (:mod:`airflow_broadway.core.schema.encoding`).  ``batch_key`` is null for the
#: default.  ``was`` is the id of the dead letter, if it was requeued under another id.
#: ``untimed`` is the reason why ``time`` is ``received_at``, if it should not be.
_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("time", TIMESTAMP, nullable=False),
    pa.field("message_id", pa.string(), nullable=False),
    pa.field("payload", pa.binary(), nullable=False),
    pa.field("form", pa.string()),
    pa.field("metadata", pa.string()),
    pa.field("received_at", TIMESTAMP),
    pa.field("enqueued_at", TIMESTAMP),
    pa.field("batch_key", pa.string()),
    pa.field("attempt", pa.int32()),
    pa.field("redelivered", pa.bool_()),
    pa.field("position", pa.int64()),
    pa.field("size", pa.int64()),
    pa.field("source", pa.string()),
    pa.field("was", pa.string()),
    pa.field("untimed", pa.string()),
]
#: The columns of the table's files; its partitions have two more.
COLUMNS: Final = pa.schema(_FIELDS)
_PARTITIONS: Final = [
    pa.field(name, kind, nullable=False)
    for name, kind in (("date", pa.date32()), ("hour", pa.int32()))
]
#: Columns whose nulls are counted in the log, so that readers find the files with values.
_COUNTED: Final = ("was", "untimed")

#: Properties of the table: the version of its format, and the intervals that were removed.
_VERSION: Final = "airflow_broadway.version"
_REMOVED: Final = "airflow_broadway.removed"
_PROPERTIES: Final = {
    _VERSION: str(VERSION),
    # A reader of the log reads the last checkpoint and one file per commit since.
    "delta.checkpointInterval": "10",
    # Longer than any lease, and than any broker keeps a message: afterwards no settlement appends
    # a generation again, unless its Dag was not run in the meantime.
    "delta.setTransactionRetentionDuration": "interval 90 days",
}
#: Commits that another writer refuses before this is an error.
_TRIES: Final = 50
#: Hours for which files are kept that another engine has replaced, since readers may be there, and
#: files without an entry in the log, since their writer may still append them.
_UNUSED_HOURS: Final = 7 * 24


class DataFile(NamedTuple):
    """A Parquet file of messages of one hour.

    :param path: In the archive; in a manifest, in the run's folder.
    :param hour: Its hour, counted from 1970.
    :param rows: The number of its messages.
    :param stats: The statistics for the log, as returned by :func:`stats_of`.
    """

    path: str
    hour: int
    rows: int
    size: int
    stats: str


class Removed(NamedTuple):
    """The number of removed hours, and of archived messages in them."""

    hours: int
    messages: int


def archive_folder(store: Store, pipeline: str) -> Folder:
    """Returns the archive folder of a pipeline, which need not exist."""
    return store.folder(f"{encode_name(pipeline)}/_archive")


def digest_of(payload: bytes) -> str:
    """Returns a digest that identifies a payload."""
    return hashlib.sha256(payload).hexdigest()[:32]


def hour_of(timestamp: datetime) -> int:
    """Returns the hour of a timestamp, counted from 1970."""
    return (timestamp - _EPOCH) // timedelta(hours=1)


def start_of(hour: int) -> datetime:
    """Returns the start of an hour."""
    return _EPOCH + timedelta(hours=hour)


def partition_of(hour: int) -> str:
    """Returns the folder of an hour."""
    start = start_of(hour)  # strftime would format a year before 1000 with fewer than four digits
    return f"date={start.date().isoformat()}/hour={start.hour:02d}"


def stats_of(footer: Any) -> str:
    """Returns the statistics of a file of :data:`COLUMNS`, in Delta Lake's format.

    :param footer: Its Parquet metadata.
    """
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    times = [group.column(0).statistics for group in groups]
    indexes = {name: COLUMNS.get_field_index(name) for name in _COUNTED}
    return json.dumps(
        {
            "numRecords": footer.num_rows,
            "minValues": {"time": _timestamp(min(time.min for time in times))},
            "maxValues": {"time": _timestamp(max(time.max for time in times))},
            "nullCount": {
                name: sum(group.column(index).statistics.null_count for group in groups)
                for name, index in indexes.items()
            },
        }
    )


def _timestamp(value: datetime) -> str:
    return value.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


# -- the table -------------------------------------------------------------------------------------


def import_deltalake(store: Store) -> Any:
    """Imports the client, which a process does before it receives messages for an archive.

    :raises StagingError: If it is not installed, or cannot open the store.
    """
    try:
        import deltalake
    except ImportError:
        raise StagingError(
            "an archive needs deltalake, which is not installed here: pip install"
            " 'airflow-broadway[delta]'"
        ) from None
    if "%" in store.root:
        raise StagingError(
            f"deltalake finds no table below {store.uri}, since the path has a percent sign: an"
            " archive needs another staging folder"
        )
    return deltalake


def _location(archive: Folder) -> dict[str, Any]:
    """Returns the table's address and delta-rs's options, with the identity of staging's client."""
    store = archive.store
    if store.local:
        return {"table_uri": f"{store.root}/{archive.path}"}
    options: dict[str, Any] = client_options(store.fs)
    if hasattr(store.fs, "call_s3"):
        endpoint = options.get("endpoint_url") or ""
        options = {
            "aws_access_key_id": options.get("key"),
            "aws_secret_access_key": options.get("secret"),
            "aws_session_token": options.get("token"),
            "aws_region": options["client_kwargs"].get("region_name"),
            "aws_endpoint_url": endpoint,
            "aws_allow_http": "true" if endpoint.startswith("http:") else None,
            "aws_skip_signature": "true" if options.get("anon") else None,
            "aws_conditional_put": "etag",
        }
    storage = {name: value for name, value in options.items() if value and isinstance(value, str)}
    return {"table_uri": archive.spark_uri(), "storage_options": storage}


def open_table(archive: Folder) -> Any | None:
    """Opens the newest version of the table; ``None`` if nothing was archived yet.

    :raises StagingError: If a newer release wrote it, or it cannot be read.
    """
    delta = import_deltalake(archive.store)
    with translated("read the archive", archive.store.uri):
        try:
            table = delta.DeltaTable(**_location(archive))
        except delta.exceptions.TableNotFoundError:
            return None
        version = table.metadata().configuration.get(_VERSION, "0")  # another writer created it
    check_version({"version": int(version)}, f"{archive.store.uri}/{archive.path}")
    return table


def _create_table(archive: Folder) -> Any:
    delta = import_deltalake(archive.store)
    archive.store.root_id()
    with translated("create the archive", archive.store.uri):
        try:
            table = delta.DeltaTable.create(
                schema=pa.schema([*_FIELDS, *_PARTITIONS]),
                partition_by=["date", "hour"],
                configuration=_PROPERTIES,
                raise_if_key_not_exists=False,
                **_location(archive),
            )
        except delta.exceptions.DeltaError:
            table = delta.DeltaTable(**_location(archive))  # of two concurrent writers one wins
    sync_log(archive)
    return table


def _commit(archive: Folder, change: Callable[[Any], T], table: Any | None = None) -> T:
    """Carries out a change of the table, again if a concurrent commit refuses it.

    :param table: A handle to begin with; default: the newest version.
    :raises StagingError: If it cannot be written.
    """
    refused = import_deltalake(archive.store).exceptions.CommitFailedError
    with translated("write the archive", archive.store.uri):
        for number in range(_TRIES):
            table = table or open_table(archive) or _create_table(archive)
            try:
                result = change(table)
            except refused as error:
                table, reason = None, reason_of(error)
                time.sleep(random.uniform(0.0, min(1.0, 0.01 * 2**number)))
            else:
                sync_log(archive, table.version())
                return result
    raise StagingError(f"{archive.store.uri}/{archive.path} cannot be written: {reason}")


def sync_log(archive: Folder, after: int = -1) -> None:
    """Makes the log's entries since a version durable on a disk, which delta-rs does not."""
    if not archive.store.local:
        return
    root = archive.full("")
    with os.scandir(f"{root}/_delta_log") as entries:
        # The name of the pointer to the last checkpoint is greater than any number.
        paths = [entry.path for entry in entries if entry.name > f"{after:020d}"]
    for path in paths:
        try:
            number = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # the temporary file of a concurrent commit, renamed since
            continue
        try:
            os.fsync(number)
        finally:
            os.close(number)
    for folder in (f"{root}/_delta_log", root):
        sync_folder(folder)


def has_appended(table: Any | None, key: str) -> bool:
    """Whether the files of a transaction identifier are in the table."""
    return table is not None and table.transaction_version(key) is not None


def append(
    archive: Folder, key: str, files: Sequence[DataFile], now: datetime, table: Any | None = None
) -> bool:
    """Appends existing files in one commit, once; returns whether it was by this call.

    :param key: The transaction identifier: the generation.
    :param table: A handle without the identifier to begin with, which saves requests; creates the
        table if there is none.
    :raises StagingError: If the table cannot be written.
    """
    delta = import_deltalake(archive.store)
    # By the clock that delta-rs uses to forget it; ``now`` may be a run's own.
    transaction = delta.Transaction(key, 1, int(time.time() * 1000))
    properties = delta.CommitProperties(app_transactions=[transaction])
    at = int(now.timestamp() * 1000)
    actions = [
        delta.transaction.AddAction(
            file.path,
            file.size,
            {"date": start_of(file.hour).date().isoformat(), "hour": str(file.hour % 24)},
            at,
            True,
            file.stats,
        )
        for file in files
    ]

    def change(newest: Any) -> bool:
        names = {field.name for field in newest.schema().fields}
        missing = [
            field for field in delta.Schema.from_arrow(COLUMNS).fields if field.name not in names
        ]
        if missing:  # an earlier release or another writer created it
            newest.alter.add_columns(missing)
        if (newest is not table or missing) and has_appended(newest, key):
            return False
        newest.create_write_transaction(
            actions, "append", newest.schema(), commit_properties=properties
        )
        return True

    return _commit(archive, change, table)


def files_by_hour(table: Any) -> dict[int, list[dict[str, Any]]]:
    """Returns the files of the table with path, row count and null counts, by hour."""
    actions = pa.table(table.get_add_actions(flatten=True))
    counts = [f"null_count.{name}" for name in _COUNTED]
    known = {"path", "num_records", "partition.date", "partition.hour", *counts}
    files: dict[int, list[dict[str, Any]]] = {}
    for row in actions.select([n for n in actions.column_names if n in known]).to_pylist():
        day: date = row["partition.date"]
        hour = (day - _EPOCH.date()).days * 24 + row["partition.hour"]
        files.setdefault(hour, []).append(row)
    return files


def removed_intervals(table: Any) -> list[Interval]:
    """Returns the intervals that were removed, by retention or by hand."""
    text = table.metadata().configuration.get(_REMOVED, "[]")
    return [Interval(*map(datetime.fromisoformat, bounds)) for bounds in json.loads(text)]


# -- maintenance -----------------------------------------------------------------------------------


def purge(archive: Folder, interval: Interval) -> Removed:
    """Removes an interval permanently; later reads report the gap.

    :raises RequestRefused: If it does not begin and end on the hour.
    :raises StagingError: If it cannot be removed.
    """
    for bound in interval:
        if start_of(hour_of(bound)) != bound:
            raise RequestRefused(
                f"{bound.isoformat()} is not the beginning of an hour, and an archive is removed by"
                " the hour: nothing was removed"
            )
    table = open_table(archive)
    return Removed(0, 0) if table is None else _remove(archive, table, interval)


def maintain(archive: Folder, keep: float | None, now: datetime) -> None:
    """Removes the hours that ended longer than ``keep`` seconds ago.

    Compacts none: of two concurrent compactions delta-rs refuses neither, and the rows would be
    there twice.

    :raises StagingError: If the table cannot be read or written.
    """
    table = open_table(archive) if keep is not None else None
    if table is None or keep is None:
        return
    end = hour_of(now - timedelta(seconds=keep))
    if any(hour < end for hour in files_by_hour(table)):
        _remove(archive, table, Interval(_FIRST, start_of(end)))
        _commit(archive, _vacuum)


def _vacuum(table: Any) -> None:
    table.vacuum(_UNUSED_HOURS, dry_run=False, enforce_retention_duration=False, full=True)


def _remove(archive: Folder, table: Any, interval: Interval) -> Removed:
    # Recorded first, so that concurrent reads report the gap.
    _commit(archive, lambda table: _record_removal(table, interval), table)
    hours: Counter[int] = Counter()
    paths: list[str] = []

    def delete(table: Any) -> None:
        hours.clear()
        paths.clear()
        for hour, files in files_by_hour(table).items():
            if interval.start <= start_of(hour) < interval.end:
                hours[hour] = sum(file["num_records"] or 0 for file in files)
                paths.extend(file["path"] for file in files)
        if paths:
            (after, start), (before, end) = ((at.date().isoformat(), at.hour) for at in interval)
            table.delete(
                f"(date > '{after}' or (date = '{after}' and hour >= {start}))"
                f" and (date < '{before}' or (date = '{before}' and hour < {end}))"
            )

    _commit(archive, delete)
    _remove_files(archive, paths)
    return Removed(len(hours), hours.total())


def _remove_files(archive: Folder, paths: Sequence[str]) -> None:
    # Not by VACUUM, which would also remove files that other writers are about to append.
    archive.remove(*paths)


def _record_removal(table: Any, interval: Interval) -> None:
    merged: list[Interval] = []
    for span in sorted([*removed_intervals(table), interval]):
        if merged and span.start <= merged[-1].end:
            span = Interval(merged[-1].start, max(merged.pop().end, span.end))
        merged.append(span)
    if merged != removed_intervals(table):
        spans = json.dumps([[bound.isoformat() for bound in span] for span in merged])
        table.alter.set_table_properties({_REMOVED: spans}, raise_if_not_exists=False)
