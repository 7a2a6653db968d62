"""What a message carries, for people: cut, as text, JSON or hex."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

__all__ = ["MOST_BYTES", "Payload", "payload_of"]

#: Bytes of a payload that are shown.
MOST_BYTES: Final = 4096
#: Bytes in a line of hex.
_LINE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A payload as text.

    :param received: Whether it is what the broker gave, and not what a callback made of it.
    :param form: ``json``, ``text`` or ``hex``.
    :param size: Its bytes, as far as they are known: of what a callback made, those of its JSON.
    :param cut: Whether the text is not all of it.
    """

    text: str
    form: str
    size: int
    cut: bool
    received: bool = True


def payload_of(value: Any, *, received: bool = True) -> Payload:
    """A payload, or what a callback made of it, as text."""
    return replace(_as_text(value), received=received)


def _as_text(value: Any) -> Payload:
    raw = value if isinstance(value, bytes) else None
    if raw is None:
        text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
        return _cut(text, "json", len(text.encode("utf-8", "backslashreplace")))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return _hex(raw)
    if any(ord(each) < 32 and each not in "\t\r\n" for each in text):
        return _hex(raw)
    if len(raw) <= MOST_BYTES:
        try:
            made = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
            return _cut(made, "json", len(raw))
        except (ValueError, RecursionError):
            pass
    return _cut(text, "text", len(raw))


def _cut(text: str, form: str, size: int) -> Payload:
    return Payload(text=text[:MOST_BYTES], form=form, size=size, cut=len(text) > MOST_BYTES)


def _hex(raw: bytes) -> Payload:
    lines = [
        f"{at:08x}  {raw[at : at + _LINE].hex(' ')}"
        for at in range(0, min(len(raw), MOST_BYTES // 4), _LINE)
    ]
    cut = len(raw) > MOST_BYTES // 4
    return Payload(text="\n".join(lines), form="hex", size=len(raw), cut=cut)
