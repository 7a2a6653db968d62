"""The DataFrame argument of ``handle_batch``, and the rows that are read back.

Columns: ``message_id string, data, batch_key string, metadata map<string,string>, attempt int,
redelivered boolean, received_at timestamp, position bigint``.  ``data`` is a struct of the
batcher's schema; without one, ``binary`` if every message is bytes, else ``string`` of JSON.
``batch_key`` is the key as text, in JSON unless it is a string.

DataFrames are lazy: creating one starts no job.  The reader gets the schema and only the files of
the batch, and the filter on ``batch`` lets Spark skip the row groups of other batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - everyone's name for it
from pyspark.sql import types as T  # noqa: N812

from airflow_broadway.core.formats.plan import BatchPlan, PlannedBatch
from airflow_broadway.core.schema.ddl import parse_schema
from airflow_broadway.core.schema.types import Array, Atomic, DataType, Decimal, Map, Struct

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from airflow_broadway.spark.arrow import ArrowFiles

#: The columns of the callback's DataFrame, in this order.
COLUMNS = (
    "message_id",
    "data",
    "batch_key",
    "metadata",
    "attempt",
    "redelivered",
    "received_at",
    "position",
)

#: The columns for settlement only.
PRIVATE = ("_receipt", "_payload", "_properties", "_on_success", "_on_failure", "_acked")

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

_ATOMIC: dict[Atomic, T.DataType] = {
    Atomic.BOOLEAN: T.BooleanType(),
    Atomic.TINYINT: T.ByteType(),
    Atomic.SMALLINT: T.ShortType(),
    Atomic.INT: T.IntegerType(),
    Atomic.BIGINT: T.LongType(),
    Atomic.FLOAT: T.FloatType(),
    Atomic.DOUBLE: T.DoubleType(),
    Atomic.STRING: T.StringType(),
    Atomic.BINARY: T.BinaryType(),
    Atomic.DATE: T.DateType(),
    Atomic.TIMESTAMP: T.TimestampType(),
    Atomic.TIMESTAMP_NTZ: T.TimestampNTZType(),
}


def _spark_type(kind: DataType) -> T.DataType:
    """Returns the Spark type of a schema's type.

    Built, not parsed: the meaning of ``timestamp`` in DDL depends on the session.
    """
    if isinstance(kind, Struct):
        return T.StructType(
            [
                T.StructField(
                    field.name,
                    _spark_type(field.type),
                    field.nullable,
                    {"comment": field.comment} if field.comment else None,
                )
                for field in kind.fields
            ]
        )
    if isinstance(kind, Array):
        return T.ArrayType(_spark_type(kind.element))
    if isinstance(kind, Map):
        return T.MapType(_spark_type(kind.key), _spark_type(kind.value))
    if isinstance(kind, Decimal):
        return T.DecimalType(kind.precision, kind.scale)
    return _ATOMIC[kind]


#: The columns of a plan's data files; ``data`` has its batcher's type.
_FILE = parse_schema(
    "batch bigint, source int, message_id string, data string, batch_key string,"
    " metadata map<string, string>, attempt int, redelivered boolean, received_at timestamp,"
    " position bigint, _receipt string, _payload binary, _properties string, _on_success string,"
    " _on_failure string, _acked boolean"
)


class BatchFrames:
    """Creates the DataFrames of one plan's batches.

    :param run_uri: The run's folder.
    :param arrow: Reads it where Hadoop has no file system for it.
    """

    def __init__(self, run_uri: str, plan: BatchPlan, arrow: ArrowFiles | None = None) -> None:
        self.plan = plan
        self._arrow = arrow
        self.schema = parse_schema(plan.schema) if plan.schema else None
        self._folder = f"{run_uri.rstrip('/')}/{plan.path}"
        data = Atomic.BINARY if plan.as_bytes else Atomic.STRING
        kinds = {"data": self.schema or data}
        fields = (replace(field, type=kinds.get(field.name, field.type)) for field in _FILE.fields)
        self._file_schema: Any = _spark_type(Struct(tuple(fields)))

    def messages(self, spark: SparkSession, batch: PlannedBatch) -> DataFrame:
        """Returns the DataFrame argument of ``handle_batch``."""
        return self._read_rows(spark, batch, COLUMNS).select(*COLUMNS)

    def private(self, spark: SparkSession, batch: PlannedBatch, *, data: bool) -> DataFrame:
        """Returns the same rows with the columns for settlement, to be collected into Python.

        Timestamps are microseconds since 1970 (see :func:`micros`).  Otherwise Spark would create
        naive ones in the time zone of this process, and fail at year 1 in zones west of UTC.

        :param data: Whether to include ``data`` and the other columns for ``handle_failed``.
        """
        names: Sequence[str] = COLUMNS if data else ("message_id", "attempt", "redelivered")
        columns: list[Column | str] = list(names)
        if data:
            columns = [micros(F.col(name), self._kind(name)).alias(name) for name in COLUMNS]
        rows = self._read_rows(spark, batch, (*names, *PRIVATE))
        return rows.select(*columns, "source", *PRIVATE)

    def _kind(self, name: str) -> DataType | None:
        if name == "received_at":
            return Atomic.TIMESTAMP
        return self.schema if name == "data" else None

    def _read_rows(
        self, spark: SparkSession, batch: PlannedBatch, names: Sequence[str]
    ) -> DataFrame:
        """Returns a batch's rows, with these columns and those that identify its rows, or more."""
        if self._arrow is None:
            rows = self._read_by_hadoop(spark, batch)
        else:
            paths = [f"{self.plan.path}/{self.plan.data[index]}" for index in batch.files]
            wanted = {"batch", "source", "position", *names}
            schema = T.StructType([entry for entry in self._file_schema if entry.name in wanted])
            rows = self._arrow.rows(spark, paths, batch.rows, schema, batch.bytes)
        rows = rows.where(in_ranges(batch.rows))
        return rows if batch.part is None else rows.where(in_part(batch.part))

    def _read_by_hadoop(self, spark: SparkSession, batch: PlannedBatch) -> DataFrame:
        files = [f"{self._folder}/{self.plan.data[index]}" for index in batch.files]
        # Paths may contain glob characters, such as brackets.
        reader = spark.read.schema(self._file_schema).option("__globPaths__", "false")
        # Regardless of the cluster's settings: a message that was not read must not be acked.
        reader = reader.option("ignoreMissingFiles", "false").option("ignoreCorruptFiles", "false")
        return reader.parquet(*files)


def micros(column: Column, kind: DataType | None) -> Column:
    """Converts the timestamps in a column to microseconds since 1970, at any depth.

    A map becomes an array of its entries, so that no keys collide.
    """
    if isinstance(kind, Struct):
        fields = (micros(column[f.name], f.type).alias(f.name) for f in kind.fields)
        return F.when(column.isNotNull(), F.struct(*fields))
    if isinstance(kind, Array):
        element = kind.element
        return F.transform(column, lambda item: micros(item, element))
    if isinstance(kind, Map):
        key, value = kind.key, kind.value
        return F.transform(
            F.map_entries(column),
            lambda item: F.struct(
                micros(item["key"], key).alias("key"), micros(item["value"], value).alias("value")
            ),
        )
    return F.unix_micros(column) if kind is Atomic.TIMESTAMP else column


def as_utc(value: int) -> datetime:
    """Returns microseconds since 1970 as a datetime, aware UTC."""
    return _EPOCH + timedelta(microseconds=value)


def to_python(value: Any, kind: DataType) -> Any:
    """Converts a collected value to plain Python: dicts, lists, ``bytes``, aware UTC datetimes.

    :param value: A value as converted by :func:`micros`.
    """
    if value is None:
        return None
    if isinstance(kind, Struct):
        return {field.name: to_python(value[i], field.type) for i, field in enumerate(kind.fields)}
    if isinstance(kind, Array):
        return [to_python(item, kind.element) for item in value]
    if isinstance(kind, Map):
        return {to_python(k, kind.key): to_python(v, kind.value) for k, v in value}
    if kind is Atomic.BINARY:
        return bytes(value)
    if kind is Atomic.TIMESTAMP:
        return as_utc(value)
    return value


def in_part(part: Sequence[Sequence[int]]) -> Column:
    """Returns the condition that a message belongs to a part of its batch."""
    (first_source, first), (last_source, last) = part
    source, position = F.col("source"), F.col("position")
    after = (source > first_source) | ((source == first_source) & (position >= first))
    before = (source < last_source) | ((source == last_source) & (position <= last))
    return after & before


def in_ranges(ranges: Sequence[Sequence[int]]) -> Column:
    """Returns the condition that ``batch`` lies in one of several inclusive ranges.

    The outermost bounds are tested first, because they skip row groups cheaply.
    """
    parts = [_in_range(first, last) for first, last in ranges]
    condition = parts[0]
    for part in parts[1:]:
        condition = condition | part
    if len(parts) > 1:
        condition = _in_range(min(r[0] for r in ranges), max(r[1] for r in ranges)) & condition
    return condition


def _in_range(first: int, last: int) -> Column:
    column = F.col("batch")
    return column == first if first == last else column.between(first, last)
