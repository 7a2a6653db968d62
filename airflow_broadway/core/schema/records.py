"""Converts a message's data to column values, strictly.

A schema is compiled into nested closures, one per column; each checks the exact type first, since
it runs for every value of every message.  Nothing is guessed and nothing is rounded:

==================  ================================================================================
column              accepts
==================  ================================================================================
boolean             ``bool``
tinyint … bigint    ``int`` within range; never a ``bool``, a float or text
float, double       ``float``; ``int`` within range (the nearest float, as everywhere in Spark);
                    never a ``Decimal``
decimal(p,s)        ``Decimal`` and ``int`` that fit without rounding; never a float
string              ``str`` that UTF-8 can encode; never bytes or a number
binary              ``bytes``, ``bytearray``, ``memoryview``; never text
date                ``date``, or text ``2013-01-31``; never a ``datetime``
timestamp           aware ``datetime``, or text with a zone: ``2013-01-31T12:00:00.5Z``, ``…+02:00``
timestamp_ntz       naive ``datetime``, or text without a zone
array               list, tuple or another sequence
map                 mapping
struct, the data    mapping, dataclass instance or ``NamedTuple``
==================  ================================================================================

``timestamp`` refuses text without a time zone; digits after the sixth of a second's fraction must
be zeros.  ``None`` and a missing key are null.  Keys that are not in the schema (case-sensitively)
are dropped and counted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from airflow_broadway.core.schema.types import Array, DataType, Field, Map, Struct, quote_name
from airflow_broadway.core.schema.values import (
    SHOWN_CHARACTERS,
    Convert,
    MisfitError,
    describe,
    refuse,
    simple_converter,
)

#: Dropped keys that are counted by name; further ones are counted as :data:`OTHER_KEYS`.
MAX_DROPPED_NAMES = 1000
OTHER_KEYS = "(other keys)"


class Converter:
    """A compiled schema: converts one message's data to a tuple of column values.

    For use in one thread; :meth:`Schema.converter` creates another cheaply.

    :param read_back: Whether to convert to what a batch would read back from the columns instead:
        a ``dict``, with nested structs and maps, as
        :func:`airflow_broadway.staging.arrow_schema.from_arrow` returns.
    """

    __slots__ = ("_convert", "_read_back", "dropped")

    def __init__(self, fields: tuple[Field, ...], *, read_back: bool = False) -> None:
        self._read_back = read_back
        #: Dropped keys by path (``"stops[].code"``) → count; may include keys of refused data.
        self.dropped: Counter[str] = Counter()
        self._convert = self._compile_record(fields, "")

    def __call__(self, data: Any) -> Any:
        """Converts one message's data.

        :raises ConversionError: As :class:`MisfitError`, naming column, value and rule.
        """
        return self._convert(data)

    def _compile(self, kind: DataType, path: str) -> Convert:
        """Returns the function that converts one value other than null.

        :param path: For counting dropped keys.
        """
        if isinstance(kind, Struct):
            return self._compile_record(kind.fields, f"{path}.")
        if isinstance(kind, Array):
            return _compile_array(self._compile(kind.element, f"{path}[]"))
        if isinstance(kind, Map):
            key, value = self._compile(kind.key, path), self._compile(kind.value, f"{path}[]")
            return _compile_map(key, value, read_back=self._read_back)
        return simple_converter(kind)

    def _compile_record(self, fields: tuple[Field, ...], prefix: str) -> Convert:
        names = tuple(field.name for field in fields)
        finish: Any = (lambda row: dict(zip(names, row, strict=True))) if self._read_back else tuple
        known, dropped = frozenset(names), self.dropped
        columns = [
            (name, self._compile(field.type, f"{prefix}{quote_name(name)}"), field.nullable)
            for name, field in zip(names, fields, strict=True)
        ]

        def convert(value: Any) -> Any:
            if type(value) is not dict:
                value = _as_dict(value)
            get = value.get
            row: list[Any] = []
            append = row.append
            try:
                for name, column, nullable in columns:
                    item = get(name)
                    append(None if item is None and nullable else column(item))
            except MisfitError as misfit:
                misfit.under(quote_name(names[len(row)]))
                raise
            if not known.issuperset(value):
                _count_dropped(dropped, prefix, (key for key in value if key not in known))
            return finish(row)

        return convert


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, tuple) or not hasattr(value, "_fields"):
        refuse("a mapping, a dataclass or a NamedTuple", value)
    return dict(zip(value._fields, value))  # noqa: B905  # equal lengths by construction


def _count_dropped(dropped: Counter[str], prefix: str, keys: Iterable[Any]) -> None:
    for key in keys:
        name = key if isinstance(key, str) else describe(key)
        name = prefix + name[:SHOWN_CHARACTERS].encode(errors="backslashreplace").decode()
        # Keys come from outside: unbounded, hostile ones would exhaust the memory.
        if name not in dropped and len(dropped) >= MAX_DROPPED_NAMES:
            name = OTHER_KEYS
        dropped[name] += 1


def _compile_array(element: Convert) -> Convert:
    def convert(value: Any) -> list[Any]:
        if type(value) is not list and (
            isinstance(value, (str, bytes, bytearray, memoryview))
            or not isinstance(value, Sequence)
        ):
            refuse("a list, a tuple or another sequence (array)", value)
        row: list[Any] = []
        append = row.append
        try:
            for item in value:
                append(None if item is None else element(item))
        except MisfitError as misfit:
            misfit.under(f"[{len(row)}]")
            raise
        return row

    return convert


def _compile_map(convert_key: Convert, convert_value: Convert, *, read_back: bool) -> Convert:
    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping):
            refuse("a mapping (map)", value)
        row: dict[Any, Any] = {}
        for original, item in value.items():
            try:
                key = convert_key(original)
            except MisfitError as misfit:
                rule = f"the map's keys to be {misfit.rule}"
                raise MisfitError("", rule, misfit.shown) from None
            if key in row or key != key:  # noqa: PLR0124  # NaN alone differs from itself
                refuse("the map's keys to differ from each other, and none to be NaN", original)
            try:
                row[key] = None if item is None else convert_value(item)
            except MisfitError as misfit:
                misfit.under(f"[{_path_step(original)}]")
                raise
        return row if read_back else list(row.items())

    return convert


def _path_step(key: object) -> str:
    try:
        text = repr(key)
    except Exception:  # a user's __repr__ may raise; not KeyboardInterrupt, SystemExit
        text = "?"
    return (text[:40] + "…" if len(text) > 40 else text).encode(errors="replace").decode()
