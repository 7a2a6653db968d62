"""Schemas, writers and readers of the Parquet files of a run.

There are two kinds.  *Message files* (``<generation>/messages/<batcher>/``) hold the results of the
process task, in order of arrival.  *Data files* (``batches/…/data-*.parquet``) hold the same
messages in order of batch, with the columns that Spark's ``handle_batch`` receives.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.schema.ddl import parse_schema
from airflow_broadway.staging.arrow_schema import SPARK_FILE_METADATA, array_of, arrow_struct
from airflow_broadway.staging.errors import translated
from airflow_broadway.staging.store import Folder, Sink

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

TIMESTAMP = pa.timestamp("us", tz="UTC")
METADATA = pa.map_(pa.string(), pa.string())

#: Size in bytes at which the next Parquet file is begun.
FILE_BYTES = 128 * 1024 * 1024
#: Columns of high cardinality, for which a dictionary is useless.
_NO_DICTIONARY = frozenset(
    {
        *("message_id", "data_bytes", "data_json", "position", "size", "_size", "_receipt"),
        *("_payload", "payload", "enqueued_at", "metadata"),
    }
)
#: Columns with statistics, whose bounds or null counts are read first.
_STATISTICS = frozenset(
    {
        *("batch", "chunk", "data_json", "position", "received_at", "source"),
        *("time", "untimed", "was"),
    }
)


#: The columns without nulls.
_REQUIRED = {
    **dict.fromkeys(("message_id", "batch_key", "_receipt"), pa.string()),
    **dict.fromkeys(("flush", "_flush", "redelivered", "_acked"), pa.bool_()),
    **dict.fromkeys(("position", "chunk", "size", "_size", "batch"), pa.int64()),
    **dict.fromkeys(("attempt", "source"), pa.int32()),
    "metadata": METADATA,
    "received_at": TIMESTAMP,
}


def _required(*names: str) -> list[pa.Field[Any]]:
    return [pa.field(name, _REQUIRED[name], nullable=False) for name in names]


def _data_fields(batcher: Batcher) -> list[pa.Field[Any]]:
    """Returns the data columns of a message file."""
    if batcher.schema is not None:
        return [pa.field("data", arrow_struct(parse_schema(batcher.schema)), nullable=False)]
    return [pa.field("data_bytes", pa.binary()), pa.field("data_json", pa.string())]


def _custody_fields(producer: Producer) -> list[pa.Field[Any]]:
    fields = [
        *_required("_receipt"),
        pa.field("_on_success", pa.string()),
        pa.field("_on_failure", pa.string()),
        *_required("_acked"),
    ]
    if producer.keeps_payload:
        fields += [pa.field("_payload", pa.binary()), pa.field("_properties", pa.string())]
    return fields


def message_schema(batcher: Batcher, producer: Producer) -> pa.Schema:
    """Returns the schema of a batcher's message files."""
    fields = [
        *_required("message_id"),
        *_data_fields(batcher),
        *_required("batch_key", "flush"),
        pa.field("partition", pa.int32()),
        *_required("metadata", "attempt", "redelivered", "received_at", "position", "chunk"),
        *_required("size"),
        *_custody_fields(producer),
    ]
    return pa.schema(fields, metadata=_file_metadata())


def data_schema(batcher: Batcher, producer: Producer, *, as_bytes: bool) -> pa.Schema:
    """Returns the schema of a plan's data files.

    :param as_bytes: For Spark without a schema: whether ``data`` is binary or JSON text.  The
        files of a Python batcher keep the two columns of the message files.
    """
    python = batcher.engine == "python"
    if batcher.schema is not None or python:
        data = _data_fields(batcher)
    else:
        data = [pa.field("data", pa.binary() if as_bytes else pa.string())]
    fields = [
        *_required("message_id"),
        *data,
        *_required("batch_key", "metadata", "attempt", "redelivered", "received_at", "position"),
        *_required("batch", "source"),
        *(_required("_flush", "_size") if python else []),
        *_custody_fields(producer),
    ]
    return pa.schema(fields, metadata=_file_metadata())


def _file_metadata() -> Any:
    return {**SPARK_FILE_METADATA, b"airflow-broadway.version": str(VERSION).encode()}


def _leaves(name: str, kind: pa.DataType) -> Iterator[str]:
    """Yields the Parquet paths of a column's leaves."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{name}.{field.name}", field.type)
    elif pa.types.is_map(kind):
        yield from _leaves(f"{name}.key_value.key", kind.key_type)
        yield from _leaves(f"{name}.key_value.value", kind.item_type)
    elif pa.types.is_list(kind):
        yield from _leaves(f"{name}.list.element", kind.value_type)
    else:
        yield name


class TableFiles:
    """Parquet files of one schema, of about :data:`FILE_BYTES` each.

    :param stem: The prefix of their paths: ``"a/data"`` yields ``a/data-00000.parquet`` and so on.
    :param whole: Whether to write a single file of any size.
    """

    def __init__(
        self, folder: Folder, stem: str, schema: pa.Schema, *, whole: bool = False
    ) -> None:
        self._whole = whole
        self.paths: list[str] = []
        #: The footers of the finished files, and their sizes in bytes.
        self.footers: list[pq.FileMetaData] = []
        self.sizes: list[int] = []
        self._folder = folder
        self._stem = stem
        self._schema = schema
        #: The file being written, and the encoder that writes into it.
        self._sink: Sink | None = None
        self._writer: pq.ParquetWriter

    def write(self, groups: Iterable[pa.Table]) -> int:
        """Writes tables as row groups of one file; returns the file's index."""
        sink = self._sink = self._sink or self._open()
        for group in groups:
            with self._translated():
                self._writer.write_table(group, row_group_size=max(1, group.num_rows))
        if sink.file.tell() >= FILE_BYTES and not self._whole:
            self.close()
        return len(self.paths) - 1

    def _open(self) -> Sink:
        self.paths.append(f"{self._stem}-{len(self.paths):05d}.parquet")
        sink = self._folder.sink(self.paths[-1])
        leaves = [leaf for field in self._schema for leaf in _leaves(field.name, field.type)]
        encoded: Any = [leaf for leaf in leaves if leaf not in _NO_DICTIONARY]
        counted: Any = [leaf for leaf in leaves if leaf in _STATISTICS]
        with self._translated():
            self._writer = pq.ParquetWriter(
                sink.file,
                self._schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=encoded,
                write_statistics=counted,
                store_schema=True,
                write_page_checksum=True,
            )
        return sink

    def close(self) -> None:
        """Finishes the last file durably; idempotent."""
        sink, self._sink = self._sink, None
        if sink is not None:
            with self._translated():
                try:
                    self._writer.close()
                    # Not by metadata_collector: after a failed close its finalizer would raise.
                    self.footers.append(self._writer.writer.metadata)
                    self.sizes.append(sink.file.tell())
                    sink.commit()
                finally:
                    sink.abort()

    def abort(self) -> None:
        """Discards the unfinished file; idempotent."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abort()

    def _translated(self) -> AbstractContextManager[None]:
        return translated(f"write {self.paths[-1]}", self._folder.store.uri)


class ParquetFile:
    """One Parquet file being read, row group by row group."""

    def __init__(self, folder: Folder, path: str) -> None:
        self.path = path
        self._uri = folder.store.uri
        self._source = folder.source(path)
        try:
            with translated(f"read {path}", self._uri):
                self._file = pq.ParquetFile(
                    self._source,
                    pre_buffer=not folder.store.local,
                    memory_map=False,
                    page_checksum_verification=True,
                )
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            self._source.close()
            raise
        self.groups: int = self._file.num_row_groups
        metadata = self._file.metadata
        self._columns = {
            metadata.schema.column(index).path: index for index in range(len(metadata.schema))
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        names: list[str] = self._file.schema_arrow.names
        return names

    def rows(self, group: int) -> int:
        """Returns the number of rows in a row group."""
        count: int = self._file.metadata.row_group(group).num_rows
        return count

    def bounds(self, group: int, column: str) -> tuple[Any, Any]:
        """Returns the minimum and maximum of a column in a row group."""
        statistics = self._statistics(group, column)
        return statistics.min, statistics.max

    def nulls(self, column: str) -> int:
        """Counts the nulls of a column in the whole file."""
        return sum(int(self._statistics(group, column).null_count) for group in range(self.groups))

    def _statistics(self, group: int, column: str) -> Any:
        return self._file.metadata.row_group(group).column(self._columns[column]).statistics

    def read(self, group: int, columns: list[str] | None = None) -> pa.Table:
        """Reads a row group, or some columns of it."""
        with translated(f"read {self.path}", self._uri):
            return self._file.read_row_group(group, columns=columns, use_threads=False)

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._file.close()
        self._source.close()


def timestamps(values: Sequence[datetime | None]) -> pa.Array[Any]:
    """Converts datetimes to a timestamp column."""
    values_us: list[int | None] = []
    last: datetime | None = None
    microseconds: int | None = None
    for value in values:
        if value is not last:  # messages of one receive share the timestamp
            last = value
            microseconds = None if value is None else (value - _EPOCH) // _MICROSECOND
        values_us.append(microseconds)
    column: pa.Array[Any] = array_of(values_us, pa.int64()).view(TIMESTAMP)
    return column


def maps(rows: Sequence[Mapping[str, str]]) -> pa.Array[Any]:
    """Converts dicts to a column of maps from text to text."""
    offsets: list[int] = [0]
    keys: list[str] = []
    items: list[str] = []
    for row in rows:
        if row:
            keys.extend(row)
            items.extend(row.values())
        offsets.append(len(keys))
    text = pa.string()
    start: Any = array_of(offsets, pa.int32())
    children = array_of(keys, text), array_of(items, text)
    column: pa.Array[Any] = pa.MapArray.from_arrays(start, *children)
    return column


def holds(ranges: Sequence[Sequence[int]], first: int, last: int) -> bool:
    """Whether any number from ``first`` to ``last`` is in one of the sorted, inclusive ranges."""
    at = bisect.bisect_left(ranges, first, key=lambda bounds: bounds[1])
    return at < len(ranges) and ranges[at][0] <= last
