"""The properties of AMQP messages, as the bytes they came in and as Python's values.

The bytes are a field of flags and the properties that it names, as AMQP 0-9-1 §4.2.6.1 has them,
with RabbitMQ's types in tables.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

from airflow_broadway.core.errors import ProducerError

#: Names of properties by their bit, from the highest.
FIELDS = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)

#: How deep tables may nest; what is deeper is hostile.
_MAX_DEPTH = 64


class Instant(int):
    """A timestamp in a table that no ``datetime`` holds: senders write milliseconds and more."""


def decode(data: bytes) -> dict[str, Any]:
    """The properties by name; ``headers`` with the types of AMQP in Python.

    :raises ProducerError: If they are no properties.
    """
    try:
        (flags,) = struct.unpack_from(">H", data, 0)
        at = 2
        made: dict[str, Any] = {}
        for place, name in enumerate(FIELDS):
            if not flags & (1 << (15 - place)):
                continue
            if name == "headers":
                made[name], at = _table(data, at, 0)
            elif name in ("delivery_mode", "priority"):
                made[name] = data[at]
                at += 1
            elif name == "timestamp":
                made[name] = struct.unpack_from(">Q", data, at)[0]
                at += 8
            else:
                made[name], at = _short(data, at)
    except (struct.error, IndexError, ValueError, ArithmeticError) as error:
        raise ProducerError(f"the properties of a message cannot be read: {error}") from None
    return made


def encode(properties: Mapping[str, Any]) -> bytes:
    """The bytes that :func:`decode` reads."""
    flags, parts = 0, []
    for place, name in enumerate(FIELDS):
        value = properties.get(name)
        if value is None:
            continue
        flags |= 1 << (15 - place)
        if name == "headers":
            parts.append(_encode_table(value))
        elif name in ("delivery_mode", "priority"):
            parts.append(bytes([value]))
        elif name == "timestamp":
            parts.append(struct.pack(">Q", value))
        else:
            parts.append(_encode_short(value))
    return struct.pack(">H", flags) + b"".join(parts)


def message_id_of(data: bytes) -> str | None:
    """The property ``message_id``, if there is one that can be read."""
    try:
        found = decode(data).get("message_id")
    except ProducerError:
        return None
    return None if found is None else str(found)


# -- as bytes --------------------------------------------------------------------------------------


def fields_of(data: bytes) -> dict[str, bytes]:
    """The properties by name, each as the bytes it came in: what is kept unchanged stays so.

    :raises ProducerError: If they are no properties.
    """
    try:
        (flags,) = struct.unpack_from(">H", data, 0)
        at = 2
        made: dict[str, bytes] = {}
        for place, name in enumerate(FIELDS):
            if not flags & (1 << (15 - place)):
                continue
            if name == "headers":
                end = at + 4 + int(struct.unpack_from(">I", data, at)[0])
            elif name in ("delivery_mode", "priority"):
                end = at + 1
            elif name == "timestamp":
                end = at + 8
            else:
                end = at + 1 + data[at]
            if end > len(data):
                raise ValueError(f"{name} is cut off")
            made[name] = data[at:end]
            at = end
    except (struct.error, IndexError, ValueError) as error:
        raise ProducerError(f"the properties of a message cannot be read: {error}") from None
    return made


def join_fields(fields: Mapping[str, bytes]) -> bytes:
    """The bytes that :func:`fields_of` reads."""
    flags, parts = 0, []
    for place, name in enumerate(FIELDS):
        if name in fields:
            flags |= 1 << (15 - place)
            parts.append(fields[name])
    return struct.pack(">H", flags) + b"".join(parts)


def entries_of(table: bytes | None) -> list[tuple[bytes, bytes]]:
    """The entries of a table in order: name, and the value with its type as the bytes it came in.

    :raises ProducerError: If it is no table.
    """
    if table is None:
        return []
    made = []
    try:
        inner, _ = _long(table, 0)
        at = 0
        while at < len(inner):
            start = at + 1
            at = start + inner[at]
            end = _after(inner, at)
            if end > len(inner):
                raise ValueError("a value is cut off")
            made.append((inner[start:at], inner[at:end]))
            at = end
    except (struct.error, IndexError, ValueError) as error:
        raise ProducerError(f"the headers of a message cannot be read: {error}") from None
    return made


def join_entries(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The table that :func:`entries_of` reads."""
    inner = b"".join(bytes([len(name)]) + name + raw for name, raw in entries)
    return struct.pack(">I", len(inner)) + inner


def encode_entry(name: str, value: object) -> tuple[bytes, bytes]:
    """An entry of a table."""
    return _encode_short(name)[1:], _encode_value(value)


def decode_entry(raw: bytes) -> Any:
    """The value of an entry.

    :raises ProducerError: If it cannot be read.
    """
    try:
        return _value(raw, 0, 0)[0]
    except (struct.error, IndexError, ValueError, OverflowError, ArithmeticError) as error:
        raise ProducerError(f"a header of a message cannot be read: {error}") from None


# -- JSON for staging ------------------------------------------------------------------------------


def staged_text(route: bytes, properties: bytes, redelivered: bool) -> str:
    """The text that staging keeps of a message: its route and properties, byte for byte.

    :param redelivered: Whether it may have been handed out before.
    """
    value = {
        "route": base64.b64encode(route).decode("ascii"),
        "properties": base64.b64encode(properties).decode("ascii"),
    }
    return json.dumps({**value, "redelivered": True} if redelivered else value)


def staged_delivery(text: str | None) -> tuple[bytes, bytes, bool]:
    """What :func:`staged_text` was given: route, properties, ``redelivered``.

    :raises ProducerError: If the text is another.
    """
    if text is None:
        return b"\x00\x00", b"\x00\x00", True
    try:
        value = json.loads(text)
        route, properties = (base64.b64decode(value[name]) for name in ("route", "properties"))
        return route, properties, bool(value.get("redelivered"))
    except (ValueError, TypeError, KeyError) as error:
        raise ProducerError(f"staged properties cannot be read: {error}") from None


def json_value(value: object) -> Any:
    """A value of a table as JSON has it: bytes as text, instants as ISO 8601."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_value(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, float) and value - value != 0:  # NaN and the infinities are no JSON
        return str(value)
    return value


# -- tables ----------------------------------------------------------------------------------------

_FIXED = {
    b"b": struct.Struct(">b"),
    b"B": struct.Struct(">B"),
    b"s": struct.Struct(">h"),
    b"u": struct.Struct(">H"),
    b"I": struct.Struct(">i"),
    b"i": struct.Struct(">I"),
    b"l": struct.Struct(">q"),
    b"L": struct.Struct(">q"),
    b"f": struct.Struct(">f"),
    b"d": struct.Struct(">d"),
}


def _short(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    if end > len(data):
        raise ValueError("a short string is cut off")
    return data[at + 1 : end].decode("utf-8", "backslashreplace"), end


def _long(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 4 + struct.unpack_from(">I", data, at)[0]
    if end > len(data):
        raise ValueError("a long string is cut off")
    return data[at + 4 : end], end


def _table(data: bytes, at: int, depth: int) -> tuple[dict[str, Any], int]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"tables nested more than {_MAX_DEPTH} deep")
    inner, end = _long(data, at)
    made: dict[str, Any] = {}
    at = 0
    while at < len(inner):
        key, at = _short(inner, at)
        made[key], at = _value(inner, at, depth)
    return made, end


def _value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    kind = data[at : at + 1]
    at += 1
    fixed = _FIXED.get(kind)
    if fixed is not None:
        return fixed.unpack_from(data, at)[0], at + fixed.size
    if kind == b"S":
        raw, at = _long(data, at)
        try:
            return raw.decode(), at
        except UnicodeDecodeError:
            return raw, at
    if kind == b"x":
        return _long(data, at)
    if kind == b"t":
        return data[at] != 0, at + 1
    if kind == b"V":
        return None, at
    if kind == b"F":
        return _table(data, at, depth + 1)
    if kind == b"A":
        if depth > _MAX_DEPTH:
            raise ValueError(f"tables nested more than {_MAX_DEPTH} deep")
        inner, end = _long(data, at)
        items, place = [], 0
        while place < len(inner):
            item, place = _value(inner, place, depth + 1)
            items.append(item)
        return items, end
    if kind == b"T":
        return _instant(struct.unpack_from(">Q", data, at)[0]), at + 8
    if kind == b"D":
        scale, number = struct.unpack_from(">Bi", data, at)
        return Decimal(number).scaleb(-scale), at + 5
    raise ValueError(f"a value of unknown type {kind!r}")


def _instant(seconds: int) -> datetime | Instant:
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (OSError, OverflowError, ValueError):
        return Instant(seconds)


def _after(data: bytes, at: int) -> int:
    """Where the value at ``at`` ends."""
    kind = data[at : at + 1]
    at += 1
    fixed = _FIXED.get(kind)
    if fixed is not None:
        return at + fixed.size
    if kind in (b"S", b"x", b"F", b"A"):
        return at + 4 + int(struct.unpack_from(">I", data, at)[0])
    sizes = {b"t": 1, b"V": 0, b"T": 8, b"D": 5}
    if kind not in sizes:
        raise ValueError(f"a value of unknown type {kind!r}")
    return at + sizes[kind]


def _encode_short(text: str) -> bytes:
    raw = str(text).encode("utf-8", "replace")[:255]
    return bytes([len(raw)]) + raw


def _encode_table(table: Mapping[str, Any]) -> bytes:
    inner = b"".join(_encode_short(key) + _encode_value(item) for key, item in table.items())
    return struct.pack(">I", len(inner)) + inner


def _encode_value(value: object) -> bytes:
    if value is None:
        return b"V"
    if isinstance(value, bool):
        return b"t" + bytes([value])
    if isinstance(value, Instant):
        return b"T" + struct.pack(">Q", value)
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return b"l" + struct.pack(">q", value)
        return _encode_value(str(value))
    if isinstance(value, float):
        return b"d" + struct.pack(">d", value)
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogateescape")
        return b"S" + struct.pack(">I", len(raw)) + raw
    if isinstance(value, bytes):
        return b"x" + struct.pack(">I", len(value)) + value
    if isinstance(value, datetime):
        return b"T" + struct.pack(">Q", max(0, int(value.timestamp())))
    if isinstance(value, Decimal):
        sign, digits, exponent = value.as_tuple()
        number = int("".join(map(str, digits))) * (-1 if sign else 1)
        if isinstance(exponent, int) and -255 <= exponent <= 0 and -(2**31) <= number < 2**31:
            return b"D" + struct.pack(">Bi", -exponent, number)
        return _encode_value(str(value))
    if isinstance(value, Mapping):
        return b"F" + _encode_table(value)
    if isinstance(value, (list, tuple)):
        inner = b"".join(map(_encode_value, value))
        return b"A" + struct.pack(">I", len(inner)) + inner
    return _encode_value(str(value))
