"""Encodes data and metadata as strict JSON text.

JSON has neither dates nor exact decimals.  They become JSON strings, which every reader can cast
without loss: a ``Decimal`` in its own digits, a date, a naive ``datetime`` and an aware one (in
UTC) as ISO 8601, a ``UUID`` in its usual form.  Bytes, sets, other objects, keys that are not text,
NaN and infinities are refused with their path: :func:`json.dumps` would silently convert some of
them.
"""

from __future__ import annotations

import base64
import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from airflow_broadway.core.schema.values import LARGE_INT, UTC, MisfitError, describe, encodable

#: The prefix of metadata bytes that are not UTF-8 text.
BASE64 = "base64:"


def encode_json(value: Any, *, path: str = "data") -> str:
    """Encodes ``value`` as compact JSON text.

    :param path: The name of the value in errors.
    :raises ConversionError: Naming the path of a part that JSON does not support.
    """
    try:
        # json.dumps would merge the keys 1 and "1".
        if not _has_other_keys(value):
            text = _dumps(value)
            if text.isascii() or encodable(text):
                return text
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        _raise_misfit(value, path)
    except RecursionError:
        pass
    raise MisfitError(path, "data nested less deeply, without circular references", describe(value))


def encode_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Encodes a message's metadata for Spark: text under each key.

    Text stays as it is, and what JSON encodes as a string (see above) is written without quotes;
    all else is JSON, ``null`` and ``true`` included.  Brokers add metadata that users did not
    request, so more is accepted than in data, at any depth: bytes become the UTF-8 text they
    contain, or ``base64:`` and their Base64; NaN and infinities become ``"NaN"``, ``"Infinity"``
    and ``"-Infinity"``.

    :raises ConversionError: Naming the path of a refused part: other objects, keys that are not
        text, text that UTF-8 cannot encode.
    """
    encoded: dict[str, str] = {}
    for key, value in metadata.items():
        kind = type(value)
        if type(key) is str and key.isascii():  # the common cases first
            if kind is str:
                if value.isascii():
                    encoded[key] = value
                    continue
            elif kind is int:
                if -LARGE_INT < value < LARGE_INT:
                    encoded[key] = repr(value)
                    continue
            elif kind is bool:
                encoded[key] = "true" if value else "false"
                continue
            elif value is None:
                encoded[key] = "null"
                continue
            elif kind is list or kind is dict:
                text = _encode_flat(value)
                if text is not None:
                    encoded[key] = text
                    continue
        encoded[key] = _encode_entry(key, value)
    return encoded


def _encode_entry(key: Any, value: Any) -> str:
    """Encodes one entry of metadata, of any type."""
    if not isinstance(key, str) or not encodable(key):
        raise MisfitError("metadata", "keys that are text", describe(key))
    try:
        plain = value if type(value) is str else _stringify(value)
    except RecursionError:
        plain = value
    if isinstance(plain, str) and encodable(plain):
        return str.__str__(plain)
    return encode_json(plain, path=f"metadata[{key!r}]")


def _encode_flat(value: list[Any] | dict[Any, Any]) -> str | None:
    """Encodes a list or dictionary of short plain values, or of pairs of text, as Kafka's headers;
    returns ``None`` for any other.
    """
    if not value:
        return "[]" if type(value) is list else "{}"
    items: Any = value
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return None
        items = value.values()
    for item in items:
        kind = type(item)
        if kind is int:
            if not -LARGE_INT < item < LARGE_INT:
                return None
        elif kind is list:
            for inner in item:
                if type(inner) is not str and inner is not None:
                    return None
        elif kind is not str and kind is not bool and item is not None:
            return None
    text = "".join(_encode(value, 0))
    return text if text.isascii() else None


# --------------------------------------------------------------------------------------------------


def _as_text(value: Any) -> str | None:
    """Returns the text of a JSON string for a value of a type that JSON lacks."""
    if isinstance(value, datetime):
        if value != value:  # noqa: PLR0124  # pandas' NaT, which is a datetime
            return None
        try:
            return (value if value.utcoffset() is None else value.astimezone(UTC)).isoformat()
        except OverflowError:
            return None
    if isinstance(value, Decimal):
        return str(value) if value.is_finite() else None
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    return None


def _default(value: Any) -> Any:
    if (text := _as_text(value)) is not None:
        return text
    if isinstance(value, Mapping):
        if _has_other_keys(value := dict(value)):
            raise TypeError
        return value
    raise TypeError


_dumps = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_default
).encode


def _make_encoder() -> Callable[[Any, int], Iterable[str]]:
    """Returns the encoder's C function, which ``JSONEncoder.encode`` would create for each call."""
    make_encoder: Any = getattr(json.encoder, "c_make_encoder", None)
    if make_encoder is None:  # a Python without its C helpers
        return lambda value, level: (_dumps(value),)
    text = json.encoder.encode_basestring
    encoder: Callable[[Any, int], Iterable[str]] = make_encoder(
        None, _default, text, None, ":", ",", False, False, False
    )
    return encoder


_encode = _make_encoder()


def _has_other_keys(value: Any) -> bool:
    """Returns whether a dictionary, at any depth, has a key that is not text."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return True
            if isinstance(item, (dict, list, tuple)) and _has_other_keys(item):
                return True
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, (dict, list, tuple)) and _has_other_keys(item):
                return True
    return False


def _raise_misfit(value: Any, path: str) -> None:
    """Raises for the first part of ``value`` that JSON does not support; slow, on failure only."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise MisfitError(path, "keys that are text", describe(key))
            if not encodable(key):
                raise MisfitError(path, "keys that UTF-8 can encode", describe(key))
            _raise_misfit(item, f"{path}.{key}" if key.isidentifier() else f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _raise_misfit(item, f"{path}[{index}]")
    elif isinstance(value, (bytes, bytearray, memoryview)):
        raise MisfitError(path, "a JSON value; decode bytes, or declare a schema", describe(value))
    elif isinstance(value, str):
        if not encodable(value):
            raise MisfitError(path, "text that UTF-8 can encode", describe(value))
    elif isinstance(value, float) and not math.isfinite(value):
        raise MisfitError(path, "a finite number, as JSON has no other", describe(value))
    elif value is not None:
        try:
            _dumps(value)
        except (TypeError, ValueError):
            raise MisfitError(path, "a JSON value", describe(value)) from None


def _stringify(value: Any) -> Any:
    """Returns metadata in which every value that JSON encodes as a string is one."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = bytes(value)
        try:
            return value.decode()
        except UnicodeDecodeError:
            return BASE64 + base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key: _stringify(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_stringify(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    text = _as_text(value)
    return value if text is None else text
