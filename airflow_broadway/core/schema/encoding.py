"""Encodes Python values as JSON text: strictly for Spark, or with their types for Python batchers.

*Strict* JSON (:func:`encode_json`, :func:`encode_metadata`) has neither dates nor exact decimals.
They become JSON strings, which every reader can cast without loss: a ``Decimal`` in its own digits,
a date, a naive ``datetime`` and an aware one (in UTC) as ISO 8601, a ``UUID`` in its usual form.
Bytes, sets, other objects, keys that are not text, NaN and infinities are refused with their path:
:func:`json.dumps` would silently convert some of them.

*Plain* values (:func:`dump` and :func:`load`) are restored equal and with the same type.  They are
``None``, ``bool``, ``int``, ``float``, ``str``, ``bytes``, ``Decimal``, ``date``, ``datetime`` and
``UUID``, and lists, tuples, sets, frozensets and dictionaries of plain values.  Related types are
restored as the plain one: a ``NamedTuple`` as a tuple, an ``IntEnum`` as an ``int``, any mapping as
a ``dict``, a ``bytearray`` as ``bytes``, an aware ``datetime`` in UTC.  All else is refused, and so
is text that UTF-8 cannot encode.  Values that JSON supports are written as JSON.  Any other is
``{"!": tagged}``, where tagged scalars are written unchanged, and all else as a list of a type's
name and its content: ``{"!":["tuple",[1,2]]}``.
"""

from __future__ import annotations

import base64
import json
import json.encoder
import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple

from airflow_broadway.core.schema.values import LARGE_INT, UTC, MisfitError, describe, encodable

#: The prefix of metadata bytes that are not UTF-8 text.
BASE64 = "base64:"

_TAG: Final = "!"
_TAGGED: Final = '{"!":'


class _Mode(NamedTuple):
    """The encodings of a value.

    :param rule: The accepted values, in errors.
    :param tagged: Whether types that JSON lacks are named.
    :param lenient: Whether bytes, NaN and infinities become text.
    """

    rule: str
    tagged: bool = False
    lenient: bool = False


_STRICT: Final = _Mode("a JSON value")
_METADATA: Final = _Mode("a JSON value", lenient=True)
_PLAIN: Final = _Mode(
    "a plain value: None, a bool, number, text, bytes, Decimal, date, datetime, UUID, or a list,"
    " tuple, set or mapping of such",
    tagged=True,
)


def encode_json(value: Any, *, path: str = "data") -> str:
    """Encodes ``value`` as compact JSON text.

    :param path: The name of the value in errors.
    :raises ConversionError: Naming the path of a part that JSON does not support.
    """
    return _encode(value if is_json(value) else _convert(value, path, _STRICT))


def encode_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Encodes a message's metadata for Spark: text under each key.

    Text stays as it is, and what strict JSON encodes as a string is written without quotes; all
    else is JSON, ``null`` and ``true`` included.  Brokers add metadata that users did not request,
    so more is accepted than in data, at any depth: bytes become the UTF-8 text they contain, or
    ``base64:`` and their Base64; NaN and infinities become ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``.

    :raises ConversionError: Naming the path of a refused part: other objects, keys that are not
        text, text that UTF-8 cannot encode.
    """
    texts: dict[str, str] = {}
    for key, value in metadata.items():
        if type(key) is not str or not key.isascii():
            _check_metadata_key(key)
        if type(value) is str and value.isascii():  # the common cases first
            texts[key] = value
        elif type(value) is int and -LARGE_INT < value < LARGE_INT:
            texts[key] = repr(value)
        else:
            plain = value if is_json(value) else _convert(value, f"metadata[{key!r}]", _METADATA)
            texts[key] = plain if type(plain) is str else _encode(plain)
    return texts


def dump(value: Any, path: str = "data") -> str:
    """Serializes a plain value as text for :func:`load`.

    :param path: The name of the value in errors.
    :raises ConversionError: Naming the path of a part that is not plain.
    """
    if is_json(value) and not (type(value) is dict and len(value) == 1 and _TAG in value):
        return _encode(value)
    return _encode({_TAG: _convert(value, path, _PLAIN)})


def load(text: str) -> Any:
    """Returns the value that :func:`dump` wrote."""
    value = json.loads(text)
    if type(value) is dict and len(value) == 1 and _TAG in value:
        return _restore(value[_TAG])
    return value


def dump_key(key: Any) -> str:
    """Serializes a batch key: as JSON if it is a scalar or a tuple of such, else tagged.

    Keys of equal text are equal: ``1``, ``True`` and ``1.0`` are three keys, every NaN is the same.

    :raises ConversionError: If it is not a plain value.
    """
    # A key is neither a list nor a dictionary: JSON's lists stand for tuples, its objects for tags.
    try:
        if _is_listed(key):
            return _encode(_listed(key))
    except RecursionError:  # refused below
        pass
    tagged = _convert(key, "batch_key", _PLAIN)
    plain = _restore(tagged)
    return _encode(_listed(plain) if _is_listed(plain) else {_TAG: tagged})


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
        if type(key) is not str or not key.isascii():
            _check_metadata_key(key)
        kind = type(value)
        if kind is str and (value.isascii() or encodable(value)) and not value.startswith(_TAGGED):
            texts[key] = value
        elif kind is int and -LARGE_INT < value < LARGE_INT:
            texts[key] = f"{_TAGGED}{value}}}"
        elif kind in _EMPTY and not value:
            texts[key] = _EMPTY[kind]
        else:
            texts[key] = _encode({_TAG: _convert(value, f"metadata[{key!r}]", _PLAIN)})
    return texts


def load_metadata(texts: Mapping[str, str]) -> dict[str, Any]:
    """Returns the metadata that :func:`dump_metadata` wrote."""
    return {
        key: _load_tagged(text) if text.startswith(_TAGGED) else text for key, text in texts.items()
    }


def _load_tagged(text: str) -> Any:
    content = text[len(_TAGGED) : -1]
    if content.isascii() and content.isdigit():  # in a fifth of the time
        return int(content)
    return _EMPTY_KINDS[text]() if text in _EMPTY_KINDS else load(text)


def is_json(value: Any) -> bool:
    """Returns whether JSON preserves ``value``, its types included; ``False`` if in doubt."""
    try:
        return _is_json(value)
    except RecursionError:
        return False


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind is str:
        return value.isascii() or encodable(value)
    if value is None or kind is bool:
        return True
    if kind is int:
        return bool(-LARGE_INT < value < LARGE_INT)
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(map(_is_json, value))
    if kind is not dict:
        return False
    for key, item in value.items():
        if type(key) is not str or not (key.isascii() or encodable(key)):
            return False
        # The most frequent type is inlined: a call costs more than the rest.
        if not (type(item) is str and item.isascii()) and not _is_json(item):
            return False
    return True


# --------------------------------------------------------------------------------------------------


def _make_encoder() -> Callable[[Any], str]:
    """Creates an encoder once: ``JSONEncoder.encode`` would create one per call."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    quote = json.encoder.encode_basestring
    if make is None:  # a Python without its C helpers
        return json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    encode = make(None, None, quote, None, ":", ",", False, False, False)
    return lambda value: "".join(encode(value, 0))


_encode: Final = _make_encoder()


def _check_metadata_key(key: Any) -> None:
    if not isinstance(key, str) or not encodable(key):
        raise MisfitError("metadata", "keys that are text", describe(key))


def _is_listed(key: Any) -> bool:
    """Returns whether JSON preserves a key, with lists in place of tuples."""
    if type(key) is tuple:
        return all(map(_is_listed, key))
    return type(key) not in (list, dict) and is_json(key)


def _listed(key: Any) -> Any:
    return [_listed(item) for item in key] if type(key) is tuple else key


def _convert(value: Any, path: str, mode: _Mode) -> Any:
    """Converts a value to what JSON supports.

    :raises MisfitError: Naming the path of a part that the mode refuses.
    """
    try:
        return _to_json(value, path, mode)
    except RecursionError:
        rule = "data nested less deeply, without circular references"
        raise MisfitError(path, rule, describe(value)) from None


def _to_json(value: Any, path: str, mode: _Mode) -> Any:
    if value is None or value is True or value is False:
        return value
    for kind, convert in _RULES:
        if isinstance(value, kind):
            return convert(value, path, mode)
    raise _misfit(value, path, mode)


def _misfit(value: Any, path: str, mode: _Mode, rule: str = "") -> MisfitError:
    return MisfitError(path, rule or mode.rule, describe(value))


def _tagged(name: str, text: str, mode: _Mode) -> Any:
    return [name, text] if mode.tagged else text


def _text(value: str, path: str, mode: _Mode) -> str:
    plain = str.__str__(value)
    if not encodable(plain):
        raise _misfit(value, path, mode, "text that UTF-8 can encode")
    return plain


def _int(value: int, path: str, mode: _Mode) -> int:
    try:
        str(number := int(value))
    except ValueError:  # of too many digits
        raise _misfit(value, path, mode) from None
    return number


def _float(value: float, path: str, mode: _Mode) -> Any:
    number = float(value)
    if math.isfinite(number):
        return number
    if not (mode.tagged or mode.lenient):
        raise _misfit(value, path, mode, "a finite number, as JSON has no other")
    if mode.tagged:
        return ["float", repr(number)]
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _bytes(value: Any, path: str, mode: _Mode) -> Any:
    if not (mode.tagged or mode.lenient):
        raise _misfit(value, path, mode, "a JSON value; decode bytes, or declare a schema")
    raw = bytes(value)
    text = base64.b64encode(raw).decode("ascii")
    if mode.tagged:
        return ["bytes", text]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return BASE64 + text


def _decimal(value: Decimal, path: str, mode: _Mode) -> Any:
    if not mode.tagged and not value.is_finite():
        raise _misfit(value, path, mode)
    return _tagged("decimal", str(value), mode)


def _timestamp(value: datetime, path: str, mode: _Mode) -> Any:
    # pandas' NaT is a datetime, and its Timestamp has nanoseconds.
    if value != value or (mode.tagged and getattr(value, "nanosecond", None)):  # noqa: PLR0124
        rule = "a datetime of at most microseconds" if mode.tagged else ""
        raise _misfit(value, path, mode, rule)
    try:
        utc = value if value.utcoffset() is None else value.astimezone(UTC)
    except OverflowError:
        raise _misfit(value, path, mode, "a timestamp from year 1 to 9999, in UTC") from None
    return _tagged("datetime", utc.isoformat(), mode)


def _sequence(value: Iterable[Any], path: str, mode: _Mode) -> Any:
    items = [_to_json(item, f"{path}[{index}]", mode) for index, item in enumerate(value)]
    if not mode.tagged:
        return items
    return ["tuple" if isinstance(value, tuple) else "list", items]


def _set(value: Iterable[Any], path: str, mode: _Mode) -> Any:
    if not mode.tagged:
        raise _misfit(value, path, mode)
    name = "set" if isinstance(value, set) else "frozenset"
    # Sorted by their text: the iteration order of a set differs between processes.
    return [name, sorted((_to_json(item, path, mode) for item in value), key=_encode)]


def _mapping(value: Mapping[Any, Any], path: str, mode: _Mode) -> Any:
    if mode.tagged:
        return [
            "dict",
            [
                [_to_json(key, path, mode), _to_json(item, f"{path}[{key!r:.40}]", mode)]
                for key, item in value.items()
            ],
        ]
    items: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise _misfit(key, path, mode, "keys that are text")
        if not encodable(key):
            raise _misfit(key, path, mode, "keys that UTF-8 can encode")
        step = f".{key}" if key.isidentifier() else f"[{key!r}]"
        items[str.__str__(key)] = _to_json(item, path + step, mode)
    return items


#: The rule by type, subclasses before their base classes.
_RULES: Final[tuple[tuple[Any, Callable[[Any, str, _Mode], Any]], ...]] = (
    (str, _text),
    (int, _int),
    (float, _float),
    ((bytes, bytearray, memoryview), _bytes),
    ((list, tuple), _sequence),
    ((set, frozenset), _set),
    (Mapping, _mapping),
    (Decimal, _decimal),
    (datetime, _timestamp),
    (date, lambda value, path, mode: _tagged("date", date.isoformat(value), mode)),
    (uuid.UUID, lambda value, path, mode: _tagged("uuid", str(value), mode)),
)

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
    "uuid": uuid.UUID,
}


def _restore(tagged: Any) -> Any:
    """Returns the value of JSON that names its types."""
    if type(tagged) is not list:
        return tagged
    kind, content = tagged
    return _RESTORE[kind](content)


#: The most frequent metadata of brokers: empty values.
_EMPTY: Final = {type(None): '{"!":null}', dict: '{"!":["dict",[]]}', list: '{"!":["list",[]]}'}
_EMPTY_KINDS: Final[dict[str, Any]] = {text: kind for kind, text in _EMPTY.items()}
