"""Serializes plain Python values as text, with their types: what a Python batcher reads.

Plain are ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, ``Decimal``, ``date``,
``datetime`` and ``UUID``, and lists, tuples, sets, frozensets and dictionaries of plain values.
They are restored equal and with the same type.  Related types are restored as the plain one: a
``NamedTuple`` as a tuple, an ``IntEnum`` as an ``int``, any mapping as a ``dict``, a ``bytearray``
as ``bytes``, an aware ``datetime`` in UTC.  All else is refused, and so is text that UTF-8 cannot
encode.

Values that JSON supports are written as JSON.  Any other is ``{"!": tagged}``, where tagged scalars
are written unchanged, and all else as a list of a type's name and its content:
``{"!":["tuple",[1,2]]}``.
"""

from __future__ import annotations

import base64
import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

from airflow_broadway.core.schema.values import LARGE_INT, UTC, MisfitError, describe, encodable

_TAG: Final = "!"
_TAGGED: Final = '{"!":'

_RULE: Final = (
    "a plain value: None, a bool, number, text, bytes, Decimal, date, datetime, UUID, or a list,"
    " tuple, set or mapping of such"
)

_encode: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=True
).encode


def dump(value: Any, path: str = "data") -> str:
    """Serializes ``value`` as text for :func:`load`.

    :param path: The name of the value in errors.
    :raises ConversionError: Naming the path of a part that is not plain.
    """
    try:
        if _is_json(value) and not (type(value) is dict and len(value) == 1 and _TAG in value):
            return _encode(value)
    except (RecursionError, ValueError):  # refused below, with its path
        pass
    return _dump_tagged(value, path)


def load(text: str) -> Any:
    """Returns the value that :func:`dump` wrote."""
    value = json.loads(text)
    if type(value) is dict and len(value) == 1 and _TAG in value:
        return _restore(value[_TAG])
    return value


def stays(value: Any) -> bool:
    """Returns whether :func:`dump` accepts ``value`` and :func:`load` restores it with equal types.

    Returns ``False`` if in doubt.

    :raises RecursionError: If the value is nested too deeply, or has circular references.
    """
    kind = type(value)
    if kind is str:
        return value.isascii() or encodable(value)
    if kind in _STAY:
        return True
    if kind is dict:
        for key, item in value.items():
            if not ((type(key) is str and key.isascii()) or stays(key)):
                return False
            # The most frequent type is inlined: a call costs more than the rest.
            if type(item) is str:
                if not (item.isascii() or encodable(item)):
                    return False
            elif type(item) not in _STAY and not stays(item):
                return False
        return True
    if kind in _COLLECTIONS:
        return all(type(item) in _STAY or stays(item) for item in value)
    if kind is int:
        return bool(-LARGE_INT < value < LARGE_INT)
    if kind is datetime:
        return value.fold == 0 and (value.tzinfo is None or value.tzinfo is UTC)
    return False


def dump_key(key: Any) -> str:
    """Serializes a batch key: as JSON if it is a scalar or a tuple of such, else tagged.

    Keys of equal text are equal: ``1``, ``True`` and ``1.0`` are three keys, every NaN is the same.

    :raises ConversionError: If it is not a plain value.
    """
    # A key is neither a list nor a dictionary: JSON's lists stand for tuples, its objects for tags.
    try:
        if _is_listed(key):
            return _encode(_listed(key))
    except (RecursionError, ValueError):  # refused below
        pass
    text = _dump_tagged(key, "batch_key")
    plain = load(text)
    return _encode(_listed(plain)) if _is_listed(plain) else text


def load_key(value: Any) -> Any:
    """Returns the key that :func:`dump_key` wrote, from its JSON."""
    if type(value) is dict:
        return _restore(value[_TAG])
    return tuple(load_key(item) for item in value) if type(value) is list else value


def dump_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Serializes metadata as text under each key: text unchanged, anything else tagged.

    :raises ConversionError: Naming the path of a part that is not plain, or a key that is not text.
    """
    texts: dict[str, str] = {}
    for key, value in metadata.items():
        if not isinstance(key, str) or not encodable(key):
            raise MisfitError("metadata", "keys that are text", describe(key))
        if type(value) is str and encodable(value) and not value.startswith(_TAGGED):
            texts[key] = value
        elif value is None:
            texts[key] = _NONE
        elif type(value) is dict and not value:
            texts[key] = _EMPTY
        else:
            texts[key] = _dump_tagged(value, f"metadata[{key!r}]")
    return texts


def load_metadata(texts: Mapping[str, str]) -> dict[str, Any]:
    """Returns the metadata that :func:`dump_metadata` wrote."""
    return {key: _untag(text) if text.startswith(_TAGGED) else text for key, text in texts.items()}


def _untag(text: str) -> Any:
    """Loads a tagged value; ``None`` and ``{}`` without parsing."""
    return None if text == _NONE else {} if text == _EMPTY else load(text)


# --------------------------------------------------------------------------------------------------

_STAY: Final = frozenset({type(None), bool, float, bytes, Decimal, date, uuid.UUID})
_COLLECTIONS: Final = frozenset({list, tuple, set, frozenset})
_JSON_SCALARS: Final = frozenset({type(None), bool, int})


def _is_json(value: Any) -> bool:
    """Returns whether JSON preserves ``value``, its types included."""
    kind = type(value)
    if kind is str:
        return value.isascii() or encodable(value)
    if kind in _JSON_SCALARS:
        return True
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(map(_is_json, value))
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or not (key.isascii() or encodable(key)):
                return False
            if type(item) not in _JSON_SCALARS and not _is_json(item):
                return False
        return True
    return False


def _is_listed(key: Any) -> bool:
    """Returns whether JSON preserves a key, with lists in place of tuples."""
    if type(key) is tuple:
        return all(map(_is_listed, key))
    return type(key) not in (list, dict) and _is_json(key)


def _listed(key: Any) -> Any:
    return [_listed(item) for item in key] if type(key) is tuple else key


def _dump_tagged(value: Any, path: str) -> str:
    try:
        return _encode({_TAG: _tag(value, path)})
    except RecursionError:
        raise MisfitError(
            path, "data nested less deeply, without circular references", describe(value)
        ) from None
    except ValueError:  # it contains an int of too many digits
        raise MisfitError(path, _RULE, describe(value)) from None


def _tag(value: Any, path: str) -> Any:
    """Returns a value as JSON that names its types."""
    if value is None or value is True or value is False:
        return value
    for kind, tag in _TAGS:
        if isinstance(value, kind):
            return tag(value, path)
    raise MisfitError(path, _RULE, describe(value))


def _text(value: str, path: str) -> str:
    plain = str.__str__(value)
    if not encodable(plain):
        raise MisfitError(path, "text that UTF-8 can encode", describe(value))
    return plain


def _number(value: float, path: str) -> Any:
    number = float(value)
    return number if math.isfinite(number) else ["float", repr(number)]


def _timestamp(value: datetime, path: str) -> Any:
    # pandas' NaT is a datetime, and its Timestamp has nanoseconds.
    if value != value or getattr(value, "nanosecond", None):  # noqa: PLR0124
        raise MisfitError(path, "a datetime of at most microseconds", describe(value))
    try:
        utc = value if value.utcoffset() is None else value.astimezone(UTC)
    except OverflowError:
        rule = "a timestamp from year 1 to 9999, in UTC"
        raise MisfitError(path, rule, describe(value)) from None
    return ["datetime", datetime.isoformat(utc)]


def _items(value: Iterable[Any], path: str) -> list[Any]:
    return [_tag(item, f"{path}[{index}]") for index, item in enumerate(value)]


def _members(kind: str) -> Callable[[Any, str], Any]:
    def tag(value: Any, path: str) -> Any:
        # Sorted by their text: the iteration order of a set differs between processes.
        return [kind, sorted((_tag(item, path) for item in value), key=_encode)]

    return tag


def _pairs(value: Mapping[Any, Any], path: str) -> Any:
    pairs = []
    for key, item in value.items():
        pairs.append([_tag(key, path), _tag(item, f"{path}[{key!r:.40}]")])
    return ["dict", pairs]


#: The tagging function by type, subclasses before their base classes.
_TAGS: Final[tuple[tuple[Any, Callable[[Any, str], Any]], ...]] = (
    (str, _text),
    (int, lambda value, path: int(value)),
    (float, _number),
    ((bytes, bytearray, memoryview), lambda value, path: ["bytes", _base64(value)]),
    (list, lambda value, path: ["list", _items(value, path)]),
    (tuple, lambda value, path: ["tuple", _items(value, path)]),
    (frozenset, _members("frozenset")),
    (set, _members("set")),
    (Mapping, _pairs),
    (Decimal, lambda value, path: ["decimal", str(value)]),
    (datetime, _timestamp),
    (date, lambda value, path: ["date", date.isoformat(value)]),
    (uuid.UUID, lambda value, path: ["uuid", value.hex]),
)


def _base64(value: Any) -> str:
    return base64.b64encode(bytes(value)).decode("ascii")


def _restore(tagged: Any) -> Any:
    """Returns the value of JSON that names its types."""
    if type(tagged) is not list:
        return tagged
    kind, content = tagged
    return _RESTORE[kind](content)


_RESTORE: Final[dict[str, Callable[[Any], Any]]] = {
    "float": float,
    "bytes": base64.b64decode,
    "list": lambda content: [_restore(item) for item in content],
    "tuple": lambda content: tuple([_restore(item) for item in content]),
    "frozenset": lambda content: frozenset([_restore(item) for item in content]),
    "set": lambda content: {_restore(item) for item in content},
    "dict": lambda content: {_restore(key): _restore(item) for key, item in content},
    "decimal": Decimal,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "uuid": lambda content: uuid.UUID(hex=content),
}

#: The most frequent metadata of brokers: empty values.
_NONE: Final = _dump_tagged(None, "")
_EMPTY: Final = _dump_tagged({}, "")
