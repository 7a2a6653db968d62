"""Turn column values into a message's data again: what a batch gets, without Arrow in between.

The functions are compiled as in :mod:`airflow_broadway.core.schema.records`, and give what
:func:`airflow_broadway.staging.arrow_schema.from_arrow` gives of the same columns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from airflow_broadway.core.schema.types import Array, Atomic, DataType, Field, Map, Struct

_Read = Callable[[Any], Any]

_FLOAT: Final = struct.Struct("f")


def reader_of(fields: tuple[Field, ...]) -> Callable[[tuple[Any, ...]], dict[str, Any]]:
    """The function that makes a ``dict`` of one row, in it others of structs and maps."""
    names = tuple(field.name for field in fields)
    changed = [(field.name, _read_of(field.type)) for field in fields]
    reads = [(name, read) for name, read in changed if read is not None]

    def read_row(row: tuple[Any, ...]) -> dict[str, Any]:
        made = dict(zip(names, row))  # noqa: B905  # as long as each other by nature
        for name, read in reads:
            if made[name] is not None:
                made[name] = read(made[name])
        return made

    return read_row


def _read_of(kind: DataType) -> _Read | None:
    """The function for values of a type, nulls apart; ``None`` if they stay what they are."""
    if isinstance(kind, Struct):
        return reader_of(kind.fields)
    if isinstance(kind, Array):
        return _list_of(_read_of(kind.element))
    if isinstance(kind, Map):
        return _map_of(_read_of(kind.key), _read_of(kind.value))
    # A column of it holds half the digits.
    return (lambda value: _FLOAT.unpack(_FLOAT.pack(value))[0]) if kind is Atomic.FLOAT else None


def _list_of(element: _Read | None) -> _Read | None:
    if element is None:
        return None
    return lambda values: [None if each is None else element(each) for each in values]


def _map_of(key: _Read | None, value: _Read | None) -> _Read:
    def read(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        made = {}
        for name, item in pairs:
            kept = item if item is None or value is None else value(item)
            made[name if key is None else key(name)] = kept
        return made

    return read
