"""Converts one scalar value: a number, text, bytes, a date or a timestamp.

Each function converts values of one type, and checks the exact class first; ``None`` is refused.
:mod:`airflow_broadway.core.schema.records` documents what each type accepts and refuses.
"""

from __future__ import annotations

import decimal
import math
import operator
import re
import struct
from collections.abc import Callable
from datetime import date, datetime, timezone
from typing import Any, NoReturn

from airflow_broadway.core.errors import ConversionError
from airflow_broadway.core.schema.types import Atomic, Decimal

#: The characters of a refused value, or of a dropped key, in errors.
SHOWN_CHARACTERS = 200

#: Smaller integers have a ``repr`` in any Python, whatever its limit of digits.
LARGE_INT = 10**18

#: Defined here, because Python 3.10 has no ``datetime.UTC``.
UTC = timezone.utc

Convert = Callable[[Any], Any]

_FLOAT_MAX = 3.4028234663852886e38
_SINGLE = struct.Struct("f")


class MisfitError(ConversionError):
    """A value that its column, or JSON, does not support.

    :param path: The value's path: ``"stops[2].code"``.
    :param rule: The expected value, as a phrase.
    :param shown: The value's type and ``repr``, cut at 200 characters; ``"null"`` for ``None``.
    """

    def __init__(self, path: str, rule: str, shown: str) -> None:
        super().__init__(path, rule, shown)
        self.path = path
        self.rule = rule
        self.shown = shown

    def __str__(self) -> str:
        return f"{self.path or 'data'}: expected {self.rule}, got {self.shown}"

    def under(self, step: str) -> None:
        """Prepends one step to the path, from the inside out."""
        joint = "." if self.path and self.path[0] != "[" else ""
        self.path = f"{step}{joint}{self.path}"
        self.args = (self.path, self.rule, self.shown)


def describe(value: object) -> str:
    """Describes ``value`` for an error message: its type and ``repr``, cut at 200 characters."""
    if value is None:
        return "null"
    if isinstance(value, (str, bytes, bytearray)):
        value, cut = value[:SHOWN_CHARACTERS], len(value) > SHOWN_CHARACTERS
    else:
        cut = False
    try:
        text = repr(value)
    except Exception:  # an int of too many digits, a class whose __repr__ raises
        text = "(its repr fails)"
    if len(text) > SHOWN_CHARACTERS or cut:
        text = text[:SHOWN_CHARACTERS] + "…"
    return f"{type(value).__name__} {text.encode(errors='backslashreplace').decode()}"


def refuse(rule: str, value: object) -> NoReturn:
    """Raises :class:`MisfitError` without a path; for a null, with a hint."""
    rule = f"{rule}; present and not null" if value is None else rule
    raise MisfitError("", rule, describe(value))


def simple_converter(kind: Atomic | Decimal) -> Convert:
    """Returns the function that converts one value, or raises :class:`MisfitError`."""
    return _decimal(kind) if isinstance(kind, Decimal) else _ATOMIC[kind]


def _boolean(value: Any) -> bool:
    if value is True or value is False:
        return bool(value)
    refuse("a bool (boolean)", value)


def _integer(kind: Atomic, bits: int) -> Convert:
    high = 2 ** (bits - 1) - 1
    low = -high - 1
    rule = f"an int from {low} to {high} ({kind.ddl}), never a bool, a float or text"

    def convert(value: Any) -> int:
        if type(value) is int:
            if low <= value <= high:
                return value
        elif type(value) is not bool:
            try:
                # An IntEnum, or a numpy integer.
                return convert(int(operator.index(value)))
            except TypeError:
                pass
        refuse(rule, value)

    return convert


def _floating(kind: Atomic) -> Convert:
    rule = f"a float or an int in its range ({kind.ddl}), never a bool, a Decimal or text"

    def convert(value: Any) -> float:
        if type(value) is float:
            if kind is Atomic.DOUBLE:
                return value
            # NaN and infinities are valid in either precision.
            if -_FLOAT_MAX <= value <= _FLOAT_MAX or not math.isfinite(value):
                single: float = _SINGLE.unpack(_SINGLE.pack(value))[0]
                return single
        elif type(value) is not bool and isinstance(value, (int, float)):
            try:
                return convert(float(value))
            except OverflowError:
                pass
        refuse(rule, value)

    return convert


def _decimal(kind: Decimal) -> Convert:
    whole = kind.precision - kind.scale
    limit = 10**whole
    unit = decimal.Decimal((0, (1,), -kind.scale))
    # quantize() never rounds here: an excess digit, before or after the point, is trapped.
    context = decimal.Context(
        prec=kind.precision, traps=[decimal.Inexact, decimal.InvalidOperation]
    )
    rule = (
        f"a Decimal or int of at most {whole} digits before and {kind.scale} after the point "
        f"({kind.ddl}), never rounded, never a float or text"
    )

    def convert(value: Any) -> decimal.Decimal:
        if isinstance(value, decimal.Decimal):
            if value.is_finite():
                try:
                    return value.quantize(unit, context=context)
                except (decimal.Inexact, decimal.InvalidOperation):
                    pass
        elif isinstance(value, int) and type(value) is not bool and -limit < value < limit:
            return decimal.Decimal(int(value)).quantize(unit, context=context)
        refuse(rule, value)

    return convert


def _string(value: Any) -> str:
    if type(value) is str:
        if value.isascii() or encodable(value):
            return value
        refuse("text that UTF-8 can encode (string)", value)
    if isinstance(value, str):
        return _string(str.__str__(value))
    refuse("a str (string)", value)


def encodable(text: str) -> bool:
    """Returns whether UTF-8 can encode ``text``: it cannot encode a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _binary(value: Any) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    refuse("bytes, a bytearray or a memoryview (binary)", value)


# --------------------------------------------------------------------------------------------------
# Dates and times
# --------------------------------------------------------------------------------------------------

_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_DATETIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ]([0-9]{2}:[0-9]{2})(?:(:[0-9]{2})(?:[.,]([0-9]+))?)?"
    r"(?:([Zz])|([+-][0-9]{2})(?::?([0-5][0-9]))?)?"
)
_AWARE = "an aware datetime, or text such as '2013-01-31T12:00:00Z' (timestamp); with a time zone"
_NAIVE = (
    "a naive datetime, or text such as '2013-01-31T12:00:00' (timestamp_ntz); without a time zone"
)


def _date(value: Any) -> date:
    if type(value) is date:
        return value
    if isinstance(value, str):
        if _DATE.fullmatch(value):
            try:
                return date.fromisoformat(value)
            except ValueError:
                refuse("a date from 0001-01-01 to 9999-12-31", value)
    elif isinstance(value, date) and not isinstance(value, datetime):
        return date(value.year, value.month, value.day)
    refuse("a date, or text such as '2013-01-31' (date), never a datetime", value)


def _timestamp(value: Any) -> datetime:
    timestamp = value if type(value) is datetime else _parse_datetime(value, _AWARE)
    if timestamp.tzinfo is UTC:
        return timestamp
    try:
        if timestamp.utcoffset() is None:
            refuse(_AWARE, value)
        return timestamp.astimezone(UTC)
    except OverflowError:
        refuse("a timestamp from year 1 to 9999, in UTC", value)


def _timestamp_ntz(value: Any) -> datetime:
    timestamp = value if type(value) is datetime else _parse_datetime(value, _NAIVE)
    if timestamp.tzinfo is not None:
        refuse(_NAIVE, value)
    return timestamp


def _parse_datetime(value: Any, rule: str) -> datetime:
    """Returns a plain datetime, aware or naive, from ISO 8601 text or a subclass of datetime."""
    if isinstance(value, str):
        match = _DATETIME.fullmatch(value)
        if match is None:
            refuse(rule, value)
        day, time, seconds, fraction, utc, hours, minutes = match.groups()
        text = f"{day}T{time}{seconds or ':00'}"
        if fraction:
            if fraction[6:].strip("0"):
                refuse("at most six digits of a second's fraction, for none is cut off", value)
            text += "." + fraction[:6].ljust(6, "0")
        if utc:
            text += "+00:00"
        elif hours:
            text += f"{hours}:{minutes or '00'}"
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            refuse("a valid date and time", value)
    # pandas' NaT is a datetime, and its Timestamp has nanoseconds.
    if isinstance(value, datetime) and value == value:  # noqa: PLR0124
        if getattr(value, "nanosecond", 0):
            refuse("at most microseconds, for nothing is cut off", value)
        return datetime(
            value.year,
            value.month,
            value.day,
            value.hour,
            value.minute,
            value.second,
            value.microsecond,
            value.tzinfo,
            fold=value.fold,
        )
    refuse(rule, value)


_ATOMIC: dict[Atomic, Convert] = {
    Atomic.BOOLEAN: _boolean,
    Atomic.TINYINT: _integer(Atomic.TINYINT, 8),
    Atomic.SMALLINT: _integer(Atomic.SMALLINT, 16),
    Atomic.INT: _integer(Atomic.INT, 32),
    Atomic.BIGINT: _integer(Atomic.BIGINT, 64),
    Atomic.FLOAT: _floating(Atomic.FLOAT),
    Atomic.DOUBLE: _floating(Atomic.DOUBLE),
    Atomic.STRING: _string,
    Atomic.BINARY: _binary,
    Atomic.DATE: _date,
    Atomic.TIMESTAMP: _timestamp,
    Atomic.TIMESTAMP_NTZ: _timestamp_ntz,
}
