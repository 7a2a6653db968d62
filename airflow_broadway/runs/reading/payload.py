"""Formats a payload as text, JSON or a hex dump; truncates it and escapes control characters."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

from airflow_broadway.core.text import escaped

#: The formats of a payload.
FORMS: Final = ("text", "json", "hex")
#: Default maximum of characters of text and JSON; a hex dump has a fourth as many bytes.
MOST_BYTES: Final = 4096
#: Bytes per line of a hex dump.
HEX_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Payload:
    """A formatted payload.

    :param form: One of :data:`FORMS`.
    :param size: Its size in bytes; for data that a callback returned, that of its JSON.
    :param cut: Whether it is truncated.
    :param note: The reason why the form is not the requested one; empty if it is.
    :param received: Whether it is the payload as received, not the data that a callback returned.
    """

    form: str
    text: str
    size: int
    cut: bool
    note: str = ""
    received: bool = True


def payload_of(
    value: Any,
    *,
    received: bool = True,
    size: int | None = None,
    form: str | None = None,
    most: int = MOST_BYTES,
) -> Payload:
    """Formats a payload in the requested form, or in the one that suits it.

    :param value: Its bytes, or a prefix of them; or the data that a callback returned.
    :param received: Whether it is the payload as received.
    :param size: Total number of bytes, if ``value`` is a prefix.
    :param most: Maximum number of characters; a hex dump has a fourth as many bytes.
    """
    if isinstance(value, bytes):
        raw = value
    else:
        raw = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")
        form = form or "json"
    payload = _format_payload(raw, len(raw) if size is None else size, form, most)
    return replace(payload, received=received)


def _format_payload(raw: bytes, size: int, form: str | None, most: int) -> Payload:
    if form == "hex" or (form is None and not _is_text(raw)):
        text = "\n".join(hex_lines(raw[: most // 4]))
        return Payload("hex", text, size, size > min(len(raw), most // 4))
    note = ""
    if form != "text":
        if len(raw) < size:
            note = "It is too long to be laid out as JSON."
        else:
            indented = _indent_json(raw, most, scalars=form == "json")
            if indented is not None:
                return Payload("json", _escape_lines(indented, most), size, len(indented) > most)
            note = "It is no JSON."
    text = raw.decode("utf-8", "backslashreplace")
    cut = len(raw) < size or len(text) > most
    return Payload("text", _escape_lines(text, most), size, cut, note if form == "json" else "")


def hex_lines(raw: bytes) -> list[str]:
    """Formats bytes as a hex dump with the offset of each line."""
    return [
        f"{at:08x}  {raw[at : at + HEX_BYTES].hex(' ')}" for at in range(0, len(raw), HEX_BYTES)
    ]


def _is_text(raw: bytes) -> bool:
    """Whether it is UTF-8, apart from a truncated last character."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return False
        text = raw[: error.start].decode("utf-8")
    return "\0" not in text


def _indent_json(raw: bytes, most: int, *, scalars: bool) -> str | None:
    """Indents JSON up to ``most`` characters; ``None`` if it is not JSON.

    :param scalars: Whether a scalar counts as JSON.
    """
    try:
        value = json.loads(raw)
        if not scalars and not isinstance(value, dict | list):
            return None
        indented, length = [], 0
        # Deeply nested JSON would be far longer indented than the payload.
        for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
            indented.append(part)
            length += len(part)
            if length > most:
                break
    except (ValueError, RecursionError):
        return None
    return "".join(indented)


def _escape_lines(text: str, most: int) -> str:
    return "\n".join(map(escaped, text[:most].split("\n")))
