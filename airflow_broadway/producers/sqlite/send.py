"""Checking what is sent to a queue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.sqlite.settling import MAX_DELAY, micros_of

__all__ = ["MAX_BODY", "Sendable", "parts"]

#: The most bytes of one body: SQLite's limit on a row, less room for the attributes.
MAX_BODY = 999_000_000

#: What may be sent: a body, a body and its attributes, or these and a delay in seconds.
Body = bytes | bytearray | memoryview | str
Sendable = (
    Body | tuple[Body, Mapping[str, Any] | None] | tuple[Body, Mapping[str, Any] | None, float]
)


def parts(message: Sendable, place: int) -> tuple[bytes, str | None, int]:
    """A message's body, attributes as JSON, and delay in microseconds.

    :param place: Its place among those sent, for errors.
    :raises ProducerError: If one of them is not what it must be.
    """
    attributes: Mapping[str, Any] | None = None
    delay: float = 0.0
    body: Any = message
    if isinstance(message, tuple):
        if len(message) == 2:
            body, attributes = message
        elif len(message) == 3:
            body, attributes, delay = message
        else:
            _bad(place, "a body, (body, attributes) or (body, attributes, delay)", message)
    if delay and not (isinstance(delay, (int, float)) and 0 <= delay < MAX_DELAY):
        _bad(place, "a delay in seconds of at least 0", delay)
    return _body(body, place), _attributes(attributes, place), micros_of(delay) if delay else 0


def _body(body: Any, place: int) -> bytes:
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError as error:
            raise ProducerError(
                f"message {place} was not sent: its text cannot be encoded as UTF-8: {error}"
            ) from None
    elif isinstance(body, (bytearray, memoryview)):
        body = bytes(body)
    elif not isinstance(body, bytes):
        _bad(place, "a body of bytes or text", body)
    if len(body) > MAX_BODY:
        raise ProducerError(
            f"message {place} was not sent: its body has {len(body)} bytes, and a row holds at most"
            f" {MAX_BODY}: store it elsewhere, and send its address"
        )
    return bytes(body)


def _attributes(attributes: Any, place: int) -> str | None:
    if attributes is None:
        return None
    if not isinstance(attributes, Mapping):
        _bad(place, "attributes in a mapping", attributes)
    try:
        return json.dumps(dict(attributes), allow_nan=False) if attributes else None
    except (TypeError, ValueError) as error:
        raise ProducerError(
            f"message {place} was not sent: its attributes are no JSON: {error}"
        ) from None


def _bad(place: int, rule: str, got: object) -> NoReturn:
    shown = repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    raise ProducerError(f"message {place} was not sent: expected {rule}, got: {shown}")
