"""The files of an archive and their content.

::

    <root>/<pipeline>/_archive/
        archive.json                          the time at which it was begun
        date=2013-01-01/hour=05/*.parquet     messages whose time is in that hour (UTC)
        hours/date=2013-01-01/05-<generation>     marks a file of the generation in that hour
        index/<generation>.json               the files that count (created exclusively)
        removed/*.json                        intervals removed by retention or by hand
        failed/<generation>.jsonl             failed messages of runs without a broker
        again/<generation>-*.jsonl            dead letters that were requeued under another id

A file of messages, or of ``again``, counts once an index names it.  So the messages of one
execution become visible together or not at all, and files of dead writers never do.  A file named
by ``hours`` that does not exist was removed.
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
from airflow_broadway.staging.tables import TIMESTAMP

BEGUN: Final = "archive.json"
HOURS: Final = "hours"
INDEX: Final = "index"
REMOVED: Final = "removed"
FAILED: Final = "failed"
AGAIN: Final = "again"

#: Microseconds in an hour.
HOUR: Final = 3_600_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

#: ``form`` is the payload's type: null for bytes, "text" for text in UTF-8, "value" for another
#: plain value (:mod:`airflow_broadway.core.schema.encoding`).  ``batch_key`` is null for the
#: default.
#: ``was`` is the id of the dead letter, if it was requeued under another id.
_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("time", TIMESTAMP, nullable=False),
    pa.field("message_id", pa.string(), nullable=False),
    pa.field("payload", pa.binary(), nullable=False),
    pa.field("form", pa.string()),
    pa.field("metadata", pa.string(), nullable=False),
    pa.field("received_at", TIMESTAMP, nullable=False),
    pa.field("enqueued_at", TIMESTAMP),
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
    """The files of one generation that count.

    :param files: Path of each file → its number of messages.
    :param untimed: Messages without a time of their own, archived by ``received_at``.
    :param why: The reason, of the first of them.
    :param at: Time of writing, as ISO 8601 text.
    :param again: The path of the file about requeued dead letters; empty if there is none.
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
        """Returns the index as JSON with its seal."""
        return sealed(asdict(self), sort_keys=True)

    @classmethod
    def loads(cls, text: str, path: str) -> Index:
        """Parses the output of :meth:`dumps`; raises like :func:`read_json`."""
        return load(cls, text, path)


def archive_folder(store: Store, pipeline: str) -> Folder:
    """Returns the archive folder of a pipeline, which need not exist."""
    return store.folder(f"{encode_name(pipeline)}/_archive")


def index_path(generation: str) -> str:
    """Returns the path of a generation's index."""
    return f"{INDEX}/{generation}.json"


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


def mark_of(hour: int, generation: str) -> str:
    """Returns the path of the mark of a generation's file in an hour."""
    date, _, within = partition_of(hour).partition("/hour=")
    return f"{HOURS}/{date}/{within}-{generation}"


def put_index(archive: Folder, index: Index, hours: Collection[int]) -> bool:
    """Writes the index of existing files, which count from then on; returns whether it was first.

    :param hours: The hours of the files.
    """
    marks = [mark_of(hour, index.generation) for hour in sorted(hours)]
    for mark in marks:
        archive.create(mark, "")
    first = archive.create(index_path(index.generation), index.dumps())
    for mark in marks:
        # Retention may meanwhile remove the hour: it finds no index yet and removes the mark,
        # without which the index would never be found.
        if not archive.exists(mark):
            archive.create(mark, "")
    return first


def parsed(value: dict[str, Any], name: str) -> datetime:
    """Parses a timestamp of a JSON object."""
    return datetime.fromisoformat(value[name])
