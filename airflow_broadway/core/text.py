"""Text for people: cut, counted, and made fit for a terminal and a log."""

from __future__ import annotations

import unicodedata

__all__ = ["cut", "escaped", "many", "printable", "without_outcome"]

#: Categories that a terminal may act on, or that hide what stands beside them: controls, format
#: characters (directions, zero width), halves of pairs, private use, line separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def many(number: int, noun: str, plural: str = "") -> str:
    """``1 batch``, ``2 batches``, ``12,345 messages``."""
    more = plural or f"{noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"
    return f"{number:,} {noun if number == 1 else more}"


def without_outcome(left: int, batches: int) -> str:
    """``1 of 3 batches has no outcome``, ``2 of 3 batches have no outcome``."""
    return f"{left:,} of {many(batches, 'batch')} {'has' if left == 1 else 'have'} no outcome"


def printable(text: object) -> str:
    """``text`` on one line, with whatever a terminal might act on written as an escape."""
    return escaped(" ".join(str(text).split()))


def escaped(line: str) -> str:
    """A line with whatever a terminal might act on written as an escape."""
    if line.isprintable():
        return line
    return "".join(
        each
        if unicodedata.category(each) not in _HIDDEN
        else each.encode("unicode_escape").decode("ascii")
        for each in line
    )


def cut(text: str, limit: int) -> str:
    """``text`` cut to ``limit`` bytes of UTF-8, at a character's edge.

    What UTF-8 cannot encode, as half a surrogate pair, is written as its escape.
    """
    if len(text) <= limit and text.isascii():
        return text
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) > limit:
        return raw[: limit - 3].decode("utf-8", "ignore") + "…"
    return raw.decode("utf-8")
