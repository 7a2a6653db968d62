"""Converts column values to a message's data, as a batch receives it, without Arrow.

The functions are compiled as in :mod:`airflow_broadway.core.schema.records`, and return what
:func:`airflow_broadway.staging.arrow_schema.from_arrow` returns for the same columns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from airflow_broadway.core.schema.types import Array, Atomic, DataType, Field, Map, Struct

_Read = Callable[[Any], Any]

_FLOAT: Final = struct.Struct("f")


def reader_of(fields: tuple[Field, ...]) -> Callable[[tuple[Any, ...]], dict[str, Any]]:
    """Returns a function that converts one row to a ``dict``, with nested structs and maps."""
    names = tuple(field.name for field in fields)
    converted = [(field.name, _compile(field.type)) for field in fields]
    reads = [(name, read) for name, read in converted if read is not None]

    def read_row(row: tuple[Any, ...]) -> dict[str, Any]:
        data = dict(zip(names, row))  # noqa: B905  # equal lengths by construction
        for name, read in reads:
            if data[name] is not None:
                data[name] = read(data[name])
        return data

    return read_row


def _compile(kind: DataType) -> _Read | None:
    """Returns the function for non-null values of a type; ``None`` if they need no conversion."""
    if isinstance(kind, Struct):
        return reader_of(kind.fields)
    if isinstance(kind, Array):
        return _compile_array(_compile(kind.element))
    if isinstance(kind, Map):
        return _compile_map(_compile(kind.key), _compile(kind.value))
    # Single precision: the column stores fewer digits than a Python float.
    return (lambda value: _FLOAT.unpack(_FLOAT.pack(value))[0]) if kind is Atomic.FLOAT else None


def _compile_array(element: _Read | None) -> _Read | None:
    if element is None:
        return None
    return lambda values: [None if value is None else element(value) for value in values]


def _compile_map(key: _Read | None, value: _Read | None) -> _Read:
    def read(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        data = {}
        for name, item in pairs:
            converted = item if item is None or value is None else value(item)
            data[name if key is None else key(name)] = converted
        return data

    return read
