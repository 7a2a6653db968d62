"""Formats text for terminals and logs: truncation, counts, escapes, tables; parses timestamps."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

#: Unicode categories that a terminal may interpret, or that hide adjacent characters: controls,
#: format characters (directions, zero width), surrogates, private use, line separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def pluralize(number: int, noun: str, plural: str = "") -> str:
    """Formats a count with its noun: ``1 batch``, ``2 batches``, ``12,345 messages``."""
    more = plural or f"{noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"
    return f"{number:,} {noun if number == 1 else more}"


def without_outcome(left: int, batches: int) -> str:
    """Formats a count: ``1 of 3 batches has no outcome``, ``2 of 3 batches have no outcome``."""
    return f"{left:,} of {pluralize(batches, 'batch')} {'has' if left == 1 else 'have'} no outcome"


def printable(text: object) -> str:
    """Returns ``text`` on one line, with characters that a terminal may interpret escaped."""
    return escaped(" ".join(str(text).split()))


def escaped(line: str) -> str:
    """Returns a line with characters that a terminal may interpret escaped."""
    if line.isprintable():
        return line
    return "".join(
        character
        if unicodedata.category(character) not in _HIDDEN
        else character.encode("unicode_escape").decode("ascii")
        for character in line
    )


def shorten(line: str, limit: int) -> str:
    """Truncates a line to ``limit`` characters."""
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def cut(text: str, limit: int) -> str:
    """Truncates ``text`` to ``limit`` bytes of UTF-8, at a character boundary.

    Characters that UTF-8 cannot encode, such as a lone surrogate, are written as escapes.
    """
    if len(text) <= limit and text.isascii():
        return text
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) > limit:
        return raw[: limit - 3].decode("utf-8", "ignore") + "…"
    return raw.decode("utf-8")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns the lines of a table; numbers right-aligned, ``None`` as ``-``."""
    cells = [list(row) for row in rows]
    texts = [["-" if cell is None else printable(cell) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
    numeric = [
        bool(cells) and all(isinstance(row[i], (int, float)) or row[i] is None for row in cells)
        for i in range(len(heads))
    ]

    def line(texts: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(texts, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return [line([head.upper() for head in heads]), *map(line, texts)]


def parse_timestamp(text: str) -> datetime:
    """Parses an ISO 8601 timestamp, in UTC unless it has another time zone; returns it in UTC.

    :raises ValueError: If it is none.
    """
    at = datetime.fromisoformat(text)
    return at.replace(tzinfo=at.tzinfo or timezone.utc).astimezone(timezone.utc)
