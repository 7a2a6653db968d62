"""A payload for people: as text, JSON or hexadecimal digits, cut, and with nothing hidden in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

from airflow_broadway.core.text import escaped

#: The forms in which a payload can be shown.
FORMS: Final = ("text", "json", "hex")
#: Characters that are shown of text and JSON unless more is asked for; of bytes in digits a fourth.
MOST_BYTES: Final = 4096
#: Bytes in a line of digits.
HEX_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload as it is shown.

    :param form: One of :data:`FORMS`.
    :param size: Its bytes; of what a callback made, those of its JSON.
    :param cut: Whether there is more of it.
    :param note: Why the form is not the one that was asked for; empty if it is.
    :param received: Whether it is what the broker gave, and not what a callback made of it.
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
    """A payload in the form that is asked for, or else the one that suits it.

    :param value: Its bytes, or the first of them; or what a callback made of it.
    :param received: Whether it is what the broker gave.
    :param size: How many bytes there are, if these are the first.
    :param most: Characters that are shown; of bytes in digits a fourth.
    """
    if isinstance(value, bytes):
        raw = value
    else:
        raw = json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")
        form = form or "json"
    found = _in_form(raw, len(raw) if size is None else size, form, most)
    return replace(found, received=received)


def _in_form(raw: bytes, size: int, form: str | None, most: int) -> Payload:
    if form == "hex" or (form is None and not _is_text(raw)):
        text = "\n".join(hex_lines(raw[: most // 4]))
        return Payload("hex", text, size, size > min(len(raw), most // 4))
    note = ""
    if form != "text":
        if len(raw) < size:
            note = "It is too long to be laid out as JSON."
        else:
            laid_out = _json(raw, most, scalars=form == "json")
            if laid_out is not None:
                return Payload("json", _shown(laid_out, most), size, len(laid_out) > most)
            note = "It is no JSON."
    text = raw.decode("utf-8", "backslashreplace")
    cut = len(raw) < size or len(text) > most
    return Payload("text", _shown(text, most), size, cut, note if form == "json" else "")


def hex_lines(raw: bytes) -> list[str]:
    """Bytes in digits, with where each line begins."""
    return [
        f"{at:08x}  {raw[at : at + HEX_BYTES].hex(' ')}" for at in range(0, len(raw), HEX_BYTES)
    ]


def _is_text(raw: bytes) -> bool:
    """Whether it is UTF-8, but for a character that was cut."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return False
        text = raw[: error.start].decode("utf-8")
    return "\0" not in text


def _json(raw: bytes, most: int, *, scalars: bool) -> str | None:
    """It laid out, as far as is shown; ``None`` if it is no JSON.

    :param scalars: Whether a lone number or word counts as such.
    """
    try:
        value = json.loads(raw)
        if not scalars and not isinstance(value, dict | list):
            return None
        laid_out, length = [], 0
        # Of what is nested deep, the whole would be far longer than the payload.
        for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
            laid_out.append(part)
            length += len(part)
            if length > most:
                break
    except (ValueError, RecursionError):
        return None
    return "".join(laid_out)


def _shown(text: str, most: int) -> str:
    return "\n".join(map(escaped, text[:most].split("\n")))
