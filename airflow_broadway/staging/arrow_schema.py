"""Carry converted rows as Arrow columns, in the types that Spark reads back as the schema says.

A converter (:meth:`airflow_broadway.core.schema.Schema.converter`) makes one tuple a message;
:func:`columns_from_rows` turns the tuples of many into one struct column, and :func:`from_arrow`
turns a column into Python values again, in the classes that the converter takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timezone
from typing import Any

import pyarrow as pa

from airflow_broadway.core.schema import (
    Array,
    Atomic,
    DataType,
    Decimal,
    Field,
    Map,
    Schema,
    SchemaError,
    Struct,
)

__all__ = [
    "SPARK_FILE_METADATA",
    "arrow_schema",
    "arrow_struct",
    "arrow_type",
    "columns_from_rows",
    "from_arrow",
]

#: What a Parquet file says of itself so that Spark 3.5 reads dates before 1582 as they are: without
#: a version it stops and asks for ``spark.sql.parquet.datetimeRebaseModeInRead``.
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


def arrow_type(kind: DataType) -> pa.DataType:
    """Return the Arrow type that Spark reads as ``kind``."""
    if isinstance(kind, Struct):
        return pa.struct([_field(field) for field in kind.fields])
    if isinstance(kind, Array):
        return pa.list_(pa.field("element", arrow_type(kind.element)))
    if isinstance(kind, Map):
        return pa.map_(arrow_type(kind.key), arrow_type(kind.value))
    if isinstance(kind, Decimal):
        return pa.decimal128(kind.precision, kind.scale)
    return _ATOMIC[kind]


def arrow_schema(schema: Schema) -> pa.Schema:
    """Return the Arrow schema of a table whose columns are the schema's."""
    return pa.schema([_field(field) for field in schema.fields])


def arrow_struct(schema: Schema) -> pa.StructType:
    """Return the type of one column, such as ``data``, that holds all the schema's columns."""
    return pa.struct([_field(field) for field in schema.fields])


def _field(field: Field) -> pa.Field[Any]:
    return pa.field(field.name, arrow_type(field.type), nullable=field.nullable)


def columns_from_rows(rows: Sequence[tuple[Any, ...]], schema: Schema) -> pa.StructArray:
    """Build one struct column from rows that the schema's converter made.

    :raises SchemaError: If the texts, bytes or lists of one column pass 2 GiB in all: build it of
        fewer rows.
    """
    kind = arrow_struct(schema)
    # Column by column: Arrow takes a list of one type much faster than a list of tuples.
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
    """Return a column's values in plain Python.

    A struct becomes a ``dict``, a list a ``list``, a map a ``dict``, an instant a ``datetime`` in
    ``datetime.timezone.utc``; a null ``None``.
    """
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    restore = _restore(column.type)
    return values if restore is None else [restore(value) for value in values]


def _restore(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return what puts plain UTC into a value's instants, or None if it can hold none.

    Arrow gives a zone of :mod:`zoneinfo` or of pytz, by what is installed.
    """
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            return None
        return lambda value: value and value.replace(tzinfo=timezone.utc)  # noqa: UP017
    if pa.types.is_struct(kind):
        inner = {field.name: change for field in kind if (change := _restore(field.type))}
        return _in_fields(inner) if inner else None
    if pa.types.is_map(kind):
        key, item = _restore(kind.key_type), _restore(kind.item_type)
        return _in_entries(key or _same, item or _same) if key or item else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = _restore(kind.value_type)
        return (lambda value: value and [element(item) for item in value]) if element else None
    return None


def _same(value: Any) -> Any:
    return value


def _in_fields(changes: dict[str, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def restore(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            for name, change in changes.items():
                value[name] = change(value[name])
        return value

    return restore


def _in_entries(key: Callable[[Any], Any], item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def restore(value: dict[Any, Any] | None) -> dict[Any, Any] | None:
        return value and {key(name): item(entry) for name, entry in value.items()}

    return restore
