"""Decodes and encodes the properties of AMQP messages; unchanged ones keep their raw bytes.

The bytes are property flags and a property list, as in AMQP 0-9-1 §4.2.6.1, with RabbitMQ's types
in tables.
"""

from __future__ import annotations

import base64
import json
import struct
from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.options import FIELDS

#: The properties of one byte.
_OCTETS = ("delivery_mode", "priority")
#: The maximum nesting of tables; a deeper table is hostile.
_MAX_DEPTH = 64


def decode(data: bytes) -> dict[str, Any]:
    """Returns the properties by name, as Python values.

    :raises ProducerError: If the bytes cannot be decoded.
    """
    fields = fields_of(data)
    with _translate_errors("the properties of a message"):
        return {name: _decode_field(name, raw) for name, raw in fields.items()}


def encode(**properties: Any) -> bytes:
    """Encodes properties of our own, with pika's encoder."""
    from pika import BasicProperties

    return b"".join(BasicProperties(**properties).encode())


def message_id_of(data: bytes) -> str | None:
    """Returns the property ``message_id``; ``None`` if it is missing or cannot be decoded."""
    try:
        message_id = decode(data).get("message_id")
    except ProducerError:
        return None
    return None if message_id is None else str(message_id)


# -- as bytes --------------------------------------------------------------------------------------


def fields_of(data: bytes) -> dict[str, bytes]:
    """Returns the properties by name, as raw bytes.

    :raises ProducerError: If the bytes cannot be decoded.
    """
    with _translate_errors("the properties of a message"):
        (flags,) = struct.unpack_from(">H", data, 0)
        at = 2
        fields: dict[str, bytes] = {}
        for index, name in enumerate(FIELDS):
            if not flags & (1 << (15 - index)):
                continue
            if name == "headers":
                end = at + 4 + int(struct.unpack_from(">I", data, at)[0])
            elif name in _OCTETS:
                end = at + 1
            elif name == "timestamp":
                end = at + 8
            else:
                end = at + 1 + data[at]
            if end > len(data):
                raise ValueError(f"{name} is cut off")
            fields[name] = data[at:end]
            at = end
    return fields


def join_fields(fields: Mapping[str, bytes]) -> bytes:
    """Returns the bytes that :func:`fields_of` splits."""
    flags, parts = 0, []
    for index, name in enumerate(FIELDS):
        if name in fields:
            flags |= 1 << (15 - index)
            parts.append(fields[name])
    return struct.pack(">H", flags) + b"".join(parts)


def entries_of(table: bytes | None) -> list[tuple[bytes, bytes]]:
    """Returns the entries of a table: the name, and the raw bytes of type and value.

    :raises ProducerError: If the bytes are not a table.
    """
    with _translate_errors("the headers of a message"):
        return [] if table is None else list(_iter_entries(table))


def join_entries(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the table that :func:`entries_of` splits."""
    inner = b"".join(bytes([len(name)]) + name + raw for name, raw in entries)
    return struct.pack(">I", len(inner)) + inner


def array_of(raw: bytes | None) -> list[bytes]:
    """Returns the values of an array: the raw bytes of type and value.

    :raises ProducerError: If the array cannot be decoded.
    """
    with _translate_errors("a header of a message"):
        if raw is None or raw[:1] != b"A":
            return []
        return [value for _, value in _iter_entries(raw[1:], named=False)]


def join_array(values: Iterable[bytes]) -> bytes:
    """Returns the array that :func:`array_of` splits."""
    inner = b"".join(values)
    return b"A" + struct.pack(">I", len(inner)) + inner


def encode_entry(name: str, value: object) -> tuple[bytes, bytes]:
    """Encodes a table entry."""
    from pika.data import encode_value

    pieces: list[bytes] = []
    encode_value(pieces, value)
    return name.encode(), b"".join(pieces)


def decode_entry(raw: bytes) -> Any:
    """Returns the value of a table entry.

    :raises ProducerError: If the value cannot be decoded.
    """
    with _translate_errors("a header of a message"):
        return _decode_value(raw[: _value_end(raw, 0)], 0)


@contextmanager
def _translate_errors(content: str) -> Iterator[None]:
    """Translates decoding errors into :class:`ProducerError`.

    :param content: The expected content, for the error.
    """
    try:
        yield
    except (struct.error, IndexError, ValueError, ArithmeticError) as error:
        raise ProducerError(f"{content} cannot be read: {error}") from None


# -- JSON for staging ------------------------------------------------------------------------------


def staged_text(route: bytes, properties: bytes, redelivered: bool) -> str:
    """Encodes a message's route and properties as JSON for staging, byte for byte.

    :param redelivered: Whether it may have been delivered before.
    """
    # Formatted by hand: dumps takes six times as long, for each message.
    first = b2a_base64(route, newline=False).decode()
    second = b2a_base64(properties, newline=False).decode()
    mark = ', "redelivered": true' if redelivered else ""
    return f'{{"route": "{first}", "properties": "{second}"{mark}}}'


def staged_delivery(text: str | None) -> tuple[bytes, bytes, bool]:
    """Decodes the text of :func:`staged_text`: route, properties, ``redelivered``.

    :raises ProducerError: If the text is invalid.
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
    """Converts a table's value to a JSON value: bytes to text, timestamps to ISO 8601."""
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
    if isinstance(value, float) and value - value != 0:  # JSON has no NaN and no infinities
        return str(value)
    return value


# -- tables ----------------------------------------------------------------------------------------

#: Type → layout of its values, for values of a fixed size.
_FIXED = {
    kind.encode(): struct.Struct(f">{layout}")
    for kind, layout in {
        "b": "b", "B": "B", "s": "h", "u": "H", "I": "i", "i": "I", "l": "q", "L": "q",
        "f": "f", "d": "d", "t": "?", "T": "Q", "D": "Bi", "V": "",
    }.items()
}  # fmt: skip


def _decode_field(name: str, raw: bytes) -> Any:
    if name == "headers":
        return _decode_table(raw, 0)
    if name in _OCTETS:
        return raw[0]
    if name == "timestamp":
        return struct.unpack(">Q", raw)[0]
    return raw[1:].decode("utf-8", "backslashreplace")


def _decode_table(raw: bytes, depth: int) -> dict[str, Any]:
    return {
        name.decode("utf-8", "backslashreplace"): _decode_value(value, depth)
        for name, value in _iter_entries(raw)
    }


def _iter_entries(data: bytes, *, named: bool = True) -> Iterator[tuple[bytes, bytes]]:
    """Yields names and values of a table; for an array, values with empty names."""
    inner, at = _strip_length(data), 0
    while at < len(inner):
        name = inner[at + 1 : at + 1 + inner[at]] if named else b""
        at += 1 + len(name) if named else 0
        end = _value_end(inner, at)
        yield name, inner[at:end]
        at = end


def _strip_length(data: bytes) -> bytes:
    """Returns the bytes after a length prefix."""
    end = 4 + struct.unpack_from(">I", data, 0)[0]
    if end > len(data):
        raise ValueError("a long string is cut off")
    return data[4:end]


def _value_end(data: bytes, at: int) -> int:
    """Returns the end of the value at ``at``."""
    kind = data[at : at + 1]
    fixed = _FIXED.get(kind)
    if fixed is not None:
        end = at + 1 + fixed.size
    elif kind in (b"S", b"x", b"F", b"A"):
        end = at + 5 + int(struct.unpack_from(">I", data, at + 1)[0])
    else:
        raise ValueError(f"a value of unknown type {kind!r}")
    if end > len(data):
        raise ValueError("a value is cut off")
    return end


def _decode_value(raw: bytes, depth: int) -> Any:
    """Decodes ``raw`` as one value."""
    kind, data = raw[:1], raw[1:]
    if kind in (b"F", b"A"):
        if depth > _MAX_DEPTH:
            raise ValueError(f"tables nested more than {_MAX_DEPTH} deep")
        if kind == b"F":
            return _decode_table(data, depth + 1)
        return [_decode_value(item, depth + 1) for _, item in _iter_entries(data, named=False)]
    if kind == b"x":
        return data[4:]
    if kind == b"S":
        try:
            return data[4:].decode()
        except UnicodeDecodeError:
            return data[4:]
    parts = _FIXED[kind].unpack(data)
    if kind == b"T":
        return _decode_timestamp(parts[0])
    if kind == b"D":
        return Decimal(parts[1]).scaleb(-parts[0])
    return parts[0] if parts else None


def _decode_timestamp(seconds: int) -> datetime | int:
    """Decodes a timestamp; beyond ``datetime`` it stays a number: some senders use milliseconds."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (OSError, OverflowError, ValueError):
        return seconds
