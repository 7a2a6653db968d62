"""Plain Python values as text, and back as they were: what reaches a Python batcher from elsewhere.

Plain are ``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, ``Decimal``, ``date``,
``datetime`` and ``UUID``, and lists, tuples, sets, frozensets and dictionaries of plain values.
They come back equal and of the same type.  What is nearly one of them comes back as that one: a
``NamedTuple`` as a tuple, an ``IntEnum`` as an ``int``, any mapping as a ``dict``, a ``bytearray``
as ``bytes``, an aware ``datetime`` as the same instant in UTC.  All else is refused, and so is text
that UTF-8 cannot encode.

What JSON can say is written as JSON.  Anything else is ``{"!": tagged}``, where tagged scalars are
themselves and all else is a list of a kind and what makes it: ``{"!":["tuple",[1,2]]}``.
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
    """Return ``value`` as text for :func:`load`.

    :param path: What errors call the value.
    :raises ConversionError: Naming the place of what is no plain value.
    """
    try:
        if _is_json(value) and not (type(value) is dict and len(value) == 1 and _TAG in value):
            return _encode(value)
    except (RecursionError, ValueError):  # it is refused below, with its place
        pass
    return _wholly_tagged(value, path)


def load(text: str) -> Any:
    """Return the value that :func:`dump` wrote."""
    value = json.loads(text)
    if type(value) is dict and len(value) == 1 and _TAG in value:
        return _made(value[_TAG])
    return value


def stays(value: Any) -> bool:
    """Whether :func:`dump` takes ``value`` and :func:`load` gives an equal one of the same types.

    In doubt it says no.

    :raises RecursionError: If the value is nested too deeply, or in a circle.
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
            # The most frequent once more, for a call costs more than the rest.
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
    """Return a batch key as text: JSON if it is a scalar or a tuple of such, else tagged.

    Keys of one text are one key: ``1``, ``True`` and ``1.0`` are three, every NaN is the same.

    :raises ConversionError: If it is no plain value.
    """
    # No key is a list, nor a dictionary: JSON's lists stand for tuples, and its objects for tags.
    try:
        if _is_listed(key):
            return _encode(_listed(key))
    except (RecursionError, ValueError):  # it is refused below
        pass
    text = _wholly_tagged(key, "batch_key")
    plain = load(text)
    return _encode(_listed(plain)) if _is_listed(plain) else text


def load_key(value: Any) -> Any:
    """Return the key that :func:`dump_key` wrote, of its JSON."""
    if type(value) is dict:
        return _made(value[_TAG])
    return tuple(load_key(each) for each in value) if type(value) is list else value


def dump_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata as text under each key: text as it is, anything else tagged.

    :raises ConversionError: Naming the place of what is no plain value, or a key that is no text.
    """
    made: dict[str, str] = {}
    for key, value in metadata.items():
        if not isinstance(key, str) or not encodable(key):
            raise MisfitError("metadata", "keys that are text", describe(key))
        if type(value) is str and encodable(value) and not value.startswith(_TAGGED):
            made[key] = value
        elif value is None:
            made[key] = _NONE
        elif type(value) is dict and not value:
            made[key] = _EMPTY
        else:
            made[key] = _wholly_tagged(value, f"metadata[{key!r}]")
    return made


def load_metadata(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata that :func:`dump_metadata` wrote."""
    return {key: _loaded(text) if text.startswith(_TAGGED) else text for key, text in texts.items()}


def _loaded(text: str) -> Any:
    """A tagged value; what stands for nothing is known without being read."""
    return None if text == _NONE else {} if text == _EMPTY else load(text)


# --------------------------------------------------------------------------------------------------

_STAY: Final = frozenset({type(None), bool, float, bytes, Decimal, date, uuid.UUID})
_COLLECTIONS: Final = frozenset({list, tuple, set, frozenset})
_JSON_SCALARS: Final = frozenset({type(None), bool, int})


def _is_json(value: Any) -> bool:
    """Whether JSON says all of ``value``, its types included."""
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
    """Whether JSON says all of a key, a list standing for a tuple."""
    if type(key) is tuple:
        return all(map(_is_listed, key))
    return type(key) not in (list, dict) and _is_json(key)


def _listed(key: Any) -> Any:
    return [_listed(each) for each in key] if type(key) is tuple else key


def _wholly_tagged(value: Any, path: str) -> str:
    try:
        return _encode({_TAG: _tagged(value, path)})
    except RecursionError:
        raise MisfitError(
            path, "data nested less deeply, and never in a circle", describe(value)
        ) from None
    except ValueError:  # an int of too many digits, somewhere in it
        raise MisfitError(path, _RULE, describe(value)) from None


def _tagged(value: Any, path: str) -> Any:
    """A value as JSON that names its types."""
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


def _instant(value: datetime, path: str) -> Any:
    # pandas' NaT claims to be a datetime, and its Timestamp counts nanoseconds.
    if value != value or getattr(value, "nanosecond", None):  # noqa: PLR0124
        raise MisfitError(path, "a datetime of at most microseconds", describe(value))
    try:
        moment = value if value.utcoffset() is None else value.astimezone(UTC)
    except OverflowError:
        raise MisfitError(path, "an instant from year 1 to 9999, in UTC", describe(value)) from None
    return ["datetime", datetime.isoformat(moment)]


def _items(value: Iterable[Any], path: str) -> list[Any]:
    return [_tagged(item, f"{path}[{index}]") for index, item in enumerate(value)]


def _members(kind: str) -> Callable[[Any, str], Any]:
    def tag(value: Any, path: str) -> Any:
        # Sorted by their text, for a set has no order that another process would see too.
        return [kind, sorted((_tagged(item, path) for item in value), key=_encode)]

    return tag


def _pairs(value: Mapping[Any, Any], path: str) -> Any:
    pairs = []
    for key, item in value.items():
        pairs.append([_tagged(key, path), _tagged(item, f"{path}[{key!r:.40}]")])
    return ["dict", pairs]


#: By type, subclasses before those they derive from: how a value is tagged.
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
    (datetime, _instant),
    (date, lambda value, path: ["date", date.isoformat(value)]),
    (uuid.UUID, lambda value, path: ["uuid", value.hex]),
)


def _base64(value: Any) -> str:
    return base64.b64encode(bytes(value)).decode("ascii")


def _made(tagged: Any) -> Any:
    """The value of some JSON that names its types."""
    if type(tagged) is not list:
        return tagged
    kind, of = tagged
    return _MAKE[kind](of)


_MAKE: Final[dict[str, Callable[[Any], Any]]] = {
    "float": float,
    "bytes": base64.b64decode,
    "list": lambda of: [_made(each) for each in of],
    "tuple": lambda of: tuple([_made(each) for each in of]),
    "frozenset": lambda of: frozenset([_made(each) for each in of]),
    "set": lambda of: {_made(each) for each in of},
    "dict": lambda of: {_made(key): _made(item) for key, item in of},
    "decimal": Decimal,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "uuid": lambda of: uuid.UUID(hex=of),
}

#: What brokers often say of a message: nothing.
_NONE: Final = _wholly_tagged(None, "")
_EMPTY: Final = _wholly_tagged({}, "")
