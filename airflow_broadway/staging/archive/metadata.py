"""Metadata as one JSON text a message, and back.

It is made of each message that is received, so it is made fast: brokers' metadata is JSON, of which
the encoder of the standard library makes text.  What is not is written by
:mod:`airflow_broadway.core.schema.plain`, which keeps every plain value.
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from airflow_broadway.core.errors import ConversionError
from airflow_broadway.core.schema.plain import dump, load

#: Types of values of which JSON says all.
_JSON: Final = frozenset({str, int, bool, type(None), list, dict})
#: A key that :func:`load` takes for its mark.
_MARK: Final = "!"


def _unknown(value: object) -> object:
    raise TypeError(f"no JSON: {type(value).__name__}")


def _encoder() -> Callable[[Any], str]:
    """``json.dumps``, made ready once: it would make an encoder anew for each message."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_unknown).encode
    quote = json.encoder.encode_basestring_ascii
    encode = make(None, _unknown, quote, None, ":", ",", False, False, False)
    return lambda value: "".join(encode(value, 0))


_encode: Final = _encoder()


def texts_of(metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of messages' metadata, in ASCII."""
    kinds: set[type] = set()
    for each in metadata:
        kinds.update(map(type, each.values()))
    if kinds <= _JSON and {*map(type, metadata)} == {dict}:
        try:
            if kinds == {str}:
                return _texts_of_texts(metadata)
            return [_json(each) for each in metadata]
        except (TypeError, ValueError, RecursionError):
            pass
    return [_plain(each) for each in metadata]


def _texts_of_texts(metadata: Sequence[Mapping[str, str]]) -> list[str]:
    """Of values that are texts, and so the same if they are equal, as 1 and True are not.

    What was sent together often has the same metadata, of which one text is made.
    """
    texts: list[str] = []
    last: Mapping[str, str] = {}
    text = "{}"
    for each in metadata:
        if each != last:
            last, text = each, _json(each)
        texts.append(text)
    return texts


def _json(metadata: Mapping[str, Any]) -> str:
    return _encode(metadata) if _MARK not in metadata else _plain(metadata)


def _plain(metadata: Mapping[str, Any]) -> str:
    """What is no plain value cannot come back as it was, and stays as people would see it."""
    try:
        text = dump(dict(metadata))
    except ConversionError:
        text = dump({ascii(key): ascii(value) for key, value in metadata.items()})
    return text


def metadata_of(text: str) -> dict[str, Any]:
    """The metadata of a text that :func:`texts_of` made."""
    value: dict[str, Any] = load(text)
    return value
