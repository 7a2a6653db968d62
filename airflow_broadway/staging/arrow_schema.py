"""Converts rows to Arrow columns of the types that Spark reads back as the schema's types.

A converter (:meth:`airflow_broadway.core.schema.ddl.Schema.converter`) returns one tuple per
message; :func:`columns_from_rows` converts tuples to one struct column, and :func:`from_arrow`
converts a column back to Python values, of the classes that the converter accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC
from itertools import pairwise
from typing import Any

import pyarrow as pa

from airflow_broadway.core.errors import SchemaError
from airflow_broadway.core.schema.ddl import Schema
from airflow_broadway.core.schema.types import Array, Atomic, DataType, Decimal, Field, Map, Struct

#: Parquet metadata with which Spark 3.5 reads dates before 1582 unchanged: without a version it
#: fails unless ``spark.sql.parquet.datetimeRebaseModeInRead`` is set.
SPARK_FILE_METADATA = {b"org.apache.spark.version": b"3.5.0"}

_ATOMIC: dict[Atomic, pa.DataType] = {
    Atomic.BOOLEAN: pa.bool_(),
    Atomic.TINYINT: pa.int8(),
    Atomic.SMALLINT: pa.int16(),
    Atomic.INT: pa.int32(),
    Atomic.BIGINT: pa.int64(),
    Atomic.FLOAT: pa.float32(),
    Atomic.DOUBLE: pa.float64(),
    Atomic.STRING: pa.string(),
    Atomic.BINARY: pa.binary(),
    Atomic.DATE: pa.date32(),
    Atomic.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    Atomic.TIMESTAMP_NTZ: pa.timestamp("us"),
}


def __getattr__(name: str) -> Any:
    # Arrow's functions; most are generated at import, which takes a while.
    if name == "compute":
        import pyarrow.compute

        return pyarrow.compute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def arrow_type(kind: DataType) -> pa.DataType:
    """Returns the Arrow type that Spark reads as ``kind``."""
    if isinstance(kind, Struct):
        return pa.struct([_field(field) for field in kind.fields])
    if isinstance(kind, Array):
        return pa.list_(pa.field("element", arrow_type(kind.element)))
    if isinstance(kind, Map):
        return pa.map_(arrow_type(kind.key), arrow_type(kind.value))
    if isinstance(kind, Decimal):
        return pa.decimal128(kind.precision, kind.scale)
    return _ATOMIC[kind]


def arrow_struct(schema: Schema) -> pa.StructType:
    """Returns the type of one column, such as ``data``, with all the schema's columns."""
    return pa.struct([_field(field) for field in schema.fields])


def _field(field: Field) -> pa.Field[Any]:
    return pa.field(field.name, arrow_type(field.type), nullable=field.nullable)


def array_of(values: Sequence[Any], kind: pa.DataType) -> Any:
    """Returns the values as one array of that type."""
    return pa.array(values, type=kind)


def table_of_columns(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """Builds a table of the schema's columns, each a list of values or an array."""
    arrays = [
        array_of(column, field.type) if type(column) is list else column
        for field, column in ((field, columns[field.name]) for field in schema)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def columns_from_rows(rows: Sequence[tuple[Any, ...]], schema: Schema) -> pa.StructArray:
    """Builds one struct column from rows of the schema's converter.

    :raises SchemaError: If the texts, bytes or lists of one column exceed 2 GiB in total: pass
        fewer rows.
    """
    kind = arrow_struct(schema)
    # Column by column: Arrow converts a list of one type much faster than a list of tuples.
    columns = zip(*rows, strict=True) if rows else [()] * len(schema.fields)
    arrays: list[pa.Array[Any]] = []
    for field, values in zip(kind, columns, strict=True):
        array = pa.array(values, type=field.type)
        if isinstance(array, pa.ChunkedArray):
            raise SchemaError(
                f"{field.name}: {len(rows)} rows hold more than the 2 GiB that a column can"
            )
        arrays.append(array)
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def from_arrow(column: pa.Array[Any] | pa.ChunkedArray[Any]) -> list[Any]:
    """Returns a column's values as Python objects.

    A struct or a map becomes a ``dict``, a list a ``list``, a timestamp a ``datetime`` in
    ``datetime.timezone.utc``, and a null ``None``.
    """
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in from_arrow(chunk)]
    values: list[Any]
    # Each nested column is converted as a whole and then sliced: a Scalar per value costs far more.
    if isinstance(column, pa.StructArray):
        names = [field.name for field in column.type]
        columns = [from_arrow(column.field(index)) for index in range(len(names))]
        values = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    elif isinstance(column, pa.MapArray):
        keys, items = from_arrow(column.keys), from_arrow(column.items)
        values = [
            dict(zip(keys[start:end], items[start:end], strict=True))
            for start, end in pairwise(column.offsets.to_pylist())
        ]
    elif isinstance(column, pa.ListArray):
        elements = from_arrow(column.values)
        values = [elements[start:end] for start, end in pairwise(column.offsets.to_pylist())]
    elif isinstance(column, pa.TimestampArray) and column.type.tz is not None:
        # Arrow would look up a time zone for each value, in zoneinfo or pytz.
        clock: list[Any] = column.cast(pa.timestamp(column.type.unit)).to_pylist()
        return [value and value.replace(tzinfo=UTC) for value in clock]
    else:
        values = column.to_pylist()
        return values
    if column.null_count:
        there = column.is_valid().to_pylist()
        return [value if valid else None for value, valid in zip(values, there, strict=True)]
    return values
