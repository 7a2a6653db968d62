"""Encodes the metadata of a message as JSON text, and decodes it.

It is encoded for every received message, so it must be fast: brokers' metadata is JSON, which the
encoder of the standard library handles.  Other values are encoded by
:mod:`airflow_broadway.core.schema.encoding`, which preserves every plain value.
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from airflow_broadway.core.errors import ConversionError
from airflow_broadway.core.schema.encoding import dump, load

#: Types of values that JSON preserves.
_JSON: Final = frozenset({str, int, bool, type(None), list, dict})
#: A key that :func:`load` interprets as its mark.
_MARK: Final = "!"


def _unknown(value: object) -> object:
    raise TypeError(f"no JSON: {type(value).__name__}")


def _encoder() -> Callable[[Any], str]:
    """Creates an encoder once, since ``json.dumps`` would create one per message."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_unknown).encode
    quote = json.encoder.encode_basestring_ascii
    encode = make(None, _unknown, quote, None, ":", ",", False, False, False)
    return lambda value: "".join(encode(value, 0))


_encode: Final = _encoder()


def texts_of(metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """Encodes messages' metadata as ASCII texts."""
    kinds: set[type] = set()
    for row in metadata:
        kinds.update(map(type, row.values()))
    if kinds <= _JSON and {*map(type, metadata)} == {dict}:
        try:
            if kinds == {str}:
                return _encode_texts(metadata)
            return [_json(row) for row in metadata]
        except (TypeError, ValueError, RecursionError):
            pass
    return [_encode_plain(row) for row in metadata]


def _encode_texts(metadata: Sequence[Mapping[str, str]]) -> list[str]:
    """Encodes metadata of text values, which are identical if equal (unlike 1 and True).

    Consecutive messages often have the same metadata, which is encoded once.
    """
    texts: list[str] = []
    last: Mapping[str, str] = {}
    text = "{}"
    for row in metadata:
        if row != last:
            last, text = row, _json(row)
        texts.append(text)
    return texts


def _json(metadata: Mapping[str, Any]) -> str:
    return _encode(metadata) if _MARK not in metadata else _encode_plain(metadata)


def _encode_plain(metadata: Mapping[str, Any]) -> str:
    """Encodes plain values losslessly, and others by their ``ascii()``."""
    try:
        text = dump(dict(metadata))
    except ConversionError:
        text = dump({ascii(key): ascii(value) for key, value in metadata.items()})
    return text


def metadata_of(text: str) -> dict[str, Any]:
    """Decodes a text of :func:`texts_of`."""
    value: dict[str, Any] = load(text)
    return value
