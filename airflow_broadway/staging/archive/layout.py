"""Where an archive's files lie, and what they hold.

::

    <root>/<pipeline>/_archive/
        archive.json                          when it was begun, and by which time it keeps
        date=2013-01-01/hour=05/*.parquet     messages whose time is in that hour (UTC)
        hours/date=2013-01-01/05-<generation>     there is a file of it in that hour
        index/<generation>.json               which of these files count (created exclusively)
        removed/*.json                        what retention, or somebody, has removed
        failed/<generation>.jsonl             what failed in runs that no broker serves
        again/<generation>-*.jsonl            which dead letters came again with another id

A file of messages, or of ``again``, counts once an index names it.  So the messages of one
execution are seen together or not at all, and what somebody who died has left is seen by nobody.
What ``hours`` names and is not there, somebody has removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa

from airflow_broadway.core.formats.layout import VERSION, load
from airflow_broadway.core.formats.sums import sealed
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.store import Folder, Store
from airflow_broadway.staging.tables import INSTANT

BEGUN: Final = "archive.json"
HOURS: Final = "hours"
INDEX: Final = "index"
REMOVED: Final = "removed"
FAILED: Final = "failed"
AGAIN: Final = "again"

#: Microseconds in an hour.
HOUR: Final = 3_600_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

#: ``form`` says what the payload was: null for bytes, "text" for text in UTF-8, "value" for another
#: plain value (:mod:`airflow_broadway.core.schema.plain`).  ``batch_key`` is null for the default.
#: ``was`` is the id that it had as a dead letter, where it was sent back with another.
_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("time", INSTANT, nullable=False),
    pa.field("message_id", pa.string(), nullable=False),
    pa.field("payload", pa.binary(), nullable=False),
    pa.field("form", pa.string()),
    pa.field("metadata", pa.string(), nullable=False),
    pa.field("received_at", INSTANT, nullable=False),
    pa.field("enqueued_at", INSTANT),
    pa.field("batch_key", pa.string()),
    pa.field("attempt", pa.int32(), nullable=False),
    pa.field("redelivered", pa.bool_(), nullable=False),
    pa.field("position", pa.int64(), nullable=False),
    pa.field("size", pa.int64(), nullable=False),
    pa.field("source", pa.string(), nullable=False),
    pa.field("was", pa.string()),
]
#: The columns of an archived message.
COLUMNS: Final = pa.schema(_FIELDS, metadata={b"airflow-broadway.version": str(VERSION).encode()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What of an archive counts for one generation.

    :param files: The path of each file, and how many messages it has.
    :param untimed: Messages that gave no time of their own, and are kept by ``received_at``.
    :param why: Why, of the first of them.
    :param at: When it was written, as ISO 8601 text.
    :param again: The path of what its messages were as dead letters; empty: none was one.
    """

    generation: str
    dag_id: str
    run_id: str
    files: dict[str, int]
    untimed: int = 0
    why: str = ""
    at: str = ""
    again: str = ""
    version: int = VERSION

    def dumps(self) -> str:
        """Return it as JSON, with its seal."""
        return sealed(asdict(self), sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> Index:
        """Read what :meth:`dumps` wrote; errors as of :func:`read_json`."""
        return load(cls, text, path)


def archive_folder(store: Store, pipeline: str) -> Folder:
    """The archive of a pipeline; it need not be there."""
    return store.folder(f"{encode_name(pipeline)}/_archive")


def index_path(generation: str) -> str:
    """Where a generation's index is."""
    return f"{INDEX}/{generation}.json"


def digest_of(payload: bytes) -> str:
    """What tells a payload from others."""
    return hashlib.sha256(payload).hexdigest()[:32]


def hour_of(instant: datetime) -> int:
    """The hour in which an instant lies, counted from 1970."""
    return (instant - _EPOCH) // timedelta(hours=1)


def start_of(hour: int) -> datetime:
    """When an hour begins."""
    return _EPOCH + timedelta(hours=hour)


def partition_of(hour: int) -> str:
    """The folder of an hour."""
    start = start_of(hour)  # its strftime would write a year before 1000 in fewer than four digits
    return f"date={start.date().isoformat()}/hour={start.hour:02d}"


def mark_of(hour: int, generation: str) -> str:
    """What says that a generation has a file in an hour."""
    date, _, within = partition_of(hour).partition("/hour=")
    return f"{HOURS}/{date}/{within}-{generation}"


def put_index(archive: Folder, index: Index, hours: Collection[int]) -> bool:
    """Have the files of an index count, which are all there; whether it was the first.

    :param hours: Those that they lie in.
    """
    marks = [mark_of(hour, index.generation) for hour in sorted(hours)]
    for mark in marks:
        archive.create(mark, "")
    first = archive.create(index_path(index.generation), index.dumps())
    for mark in marks:
        # Who removes an hour meanwhile, for it is old, finds no index yet, and removes the mark:
        # without it nobody would ever find the index.
        if not archive.exists(mark):
            archive.create(mark, "")
    return first


def parsed(value: dict[str, Any], name: str) -> datetime:
    """An instant of a JSON object."""
    return datetime.fromisoformat(value[name])
