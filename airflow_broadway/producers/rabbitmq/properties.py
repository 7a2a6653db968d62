"""The properties of AMQP messages: read from the bytes they came in, and made fit to publish again.

The bytes are a field of flags and the properties that it names, as AMQP 0-9-1 §4.2.6.1 has them,
with RabbitMQ's types in tables.  What a message came with is never changed; what it is published
again with differs where keeping it would do harm, and then says what it was in the header
``x-broadway-original``.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from airflow_broadway.core.errors import ProducerError

__all__ = [
    "FIELDS",
    "MARK",
    "Mark",
    "decode",
    "dump",
    "encode",
    "load",
    "mark_of",
    "plain",
    "republished",
]

#: The header of a message that was published again: see :class:`Mark`.
MARK = "x-broadway"
_MARK = MARK.encode()
#: The header with what could not be kept where it was.
ORIGINAL = "x-broadway-original"

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

#: What a mark of ours never exceeds.
_MAX_ID, _MAX_ATTEMPT = 200, 1_000_000
#: How deep tables may nest; what is deeper is hostile.
_DEPTH = 64
#: Bytes of headers that leave room for ours in a frame of the usual 131,072 bytes.
MAX_HEADERS = 96 * 1024
#: Kept in the original's place, these would do harm: an ``x-death`` makes the broker drop the
#: message as a cycle, ``CC`` and ``BCC`` send stray copies.
_HARMFUL_HEADERS = ("x-death", "CC", "BCC")
#: The same for properties: a foreign ``user_id`` is refused, an ``expiration`` ends the wait early.
_HARMFUL = ("user_id", "expiration")


class Mark(NamedTuple):
    """What a message says of itself that was published again.

    :param message_id: Its id, kept from its first receipt.
    :param giver: The generation that gave it back, which does not take it again.
    :param attempt: The attempt it is on.
    """

    message_id: str
    giver: str
    attempt: int


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
    except (struct.error, IndexError, ValueError, OverflowError, ArithmeticError) as error:
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


def mark_of(properties: bytes) -> Mark | None:
    """The mark of a message, if it bears one that can be read."""
    if _MARK not in properties:
        return None
    try:
        value = decode(properties).get("headers", {}).get(MARK)
        mark = Mark(str(value["id"]), str(value["giver"]), max(1, int(value["attempt"])))
    except (ProducerError, TypeError, KeyError, ValueError, OverflowError, AttributeError):
        return None
    if len(mark.message_id.encode("utf-8", "replace")) > _MAX_ID or mark.attempt > _MAX_ATTEMPT:
        return None  # not one of ours
    return mark


def republished(
    properties: bytes,
    mark: Mark,
    *,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """The properties with which a message is published again.

    :param extra: More headers of ours, such as the reason of a dead letter.
    """
    try:
        made = decode(properties)
    except ProducerError:  # it cannot be read, so it cannot be kept but as it was
        made = {"headers": {ORIGINAL: {"unreadable": properties[:MAX_HEADERS]}}}
    headers = dict(made.get("headers") or {})
    original = headers.pop(ORIGINAL, None)
    original = dict(original) if isinstance(original, Mapping) else {}
    for name in _HARMFUL_HEADERS:
        value = headers.pop(name, None)
        if name == "x-death" and isinstance(value, list):
            value = [entry for entry in value if not _ours(entry)]
        if value:
            original.setdefault(name, value)
    for name in _HARMFUL:
        value = made.pop(name, None)
        if value is not None:
            original.setdefault(name, value)
    for name in [n for n in headers if n.startswith(("x-first-death-", "x-last-death-"))]:
        del headers[name]
    ours = {MARK: {"id": mark.message_id, "giver": mark.giver, "attempt": mark.attempt}}
    ours.update(extra or {})
    headers.update(ours)
    if original:
        headers[ORIGINAL] = original
    if len(_encode_table(headers)) > MAX_HEADERS:  # its own alone still fit: they came in one frame
        headers.pop(ORIGINAL, None)
    made["headers"] = headers
    made["delivery_mode"] = 2
    return encode(made)


def _ours(entry: object) -> bool:
    return isinstance(entry, Mapping) and str(entry.get("queue", "")).startswith("broadway.")


# -- JSON for staging ------------------------------------------------------------------------------


def dump(route: bytes, properties: bytes, redelivered: bool) -> str:
    """The text that staging keeps of a message: its route and properties, byte for byte.

    :param redelivered: Whether it may have been handed out before.
    """
    value = {
        "route": base64.b64encode(route).decode("ascii"),
        "properties": base64.b64encode(properties).decode("ascii"),
    }
    return json.dumps({**value, "redelivered": True} if redelivered else value)


def load(text: str | None) -> tuple[bytes, bytes, bool]:
    """Route, properties and whether it may have been handed out before, as :func:`dump` wrote them.

    :raises ProducerError: If it did not.
    """
    if text is None:
        return b"\x00\x00", b"\x00\x00", True
    try:
        value = json.loads(text)
        route, properties = (base64.b64decode(value[name]) for name in ("route", "properties"))
        return route, properties, bool(value.get("redelivered"))
    except (ValueError, TypeError, KeyError) as error:
        raise ProducerError(f"staged properties cannot be read: {error}") from None


def plain(value: object) -> Any:
    """A value of a table as JSON has it: bytes as text, instants as ISO 8601."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
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
    if depth > _DEPTH:
        raise ValueError(f"tables nested more than {_DEPTH} deep")
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
        if depth > _DEPTH:
            raise ValueError(f"tables nested more than {_DEPTH} deep")
        inner, end = _long(data, at)
        items, place = [], 0
        while place < len(inner):
            item, place = _value(inner, place, depth + 1)
            items.append(item)
        return items, end
    if kind == b"T":
        return datetime.fromtimestamp(struct.unpack_from(">Q", data, at)[0], UTC), at + 8
    if kind == b"D":
        scale, number = struct.unpack_from(">Bi", data, at)
        return Decimal(number).scaleb(-scale), at + 5
    raise ValueError(f"a value of unknown type {kind!r}")


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
