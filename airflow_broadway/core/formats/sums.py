"""Sums of staged files: whoever writes a file notes them, and whoever settles by it compares.

Without them a lost line in a file of entries would turn a failure into a success.  The sum of a
file of lines is in the file that names it.  A JSON file that nothing names bears a *seal*: the
SHA-256 of its own text with an empty seal.  What has neither, as older releases wrote it, is read
unchecked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from airflow_broadway.core.errors import StagingDamaged

_SEAL = re.compile(r'"seal": ?"([0-9a-f]{64})"')
_EMPTY = re.compile(r'("seal": ?")"')


class Summing:
    """Sums lines as they pass; a line counts with the newline that ends it."""

    def __init__(self) -> None:
        self.lines = 0
        self.bytes = 0
        self._hash = hashlib.sha256()

    def add(self, raw: bytes, lines: int = 1) -> None:
        """Count one line, or several, given with their newlines."""
        self.lines += lines
        self.bytes += len(raw)
        self._hash.update(raw)

    def through(self, lines: Iterable[str]) -> Iterator[str]:
        """The same lines, counted."""
        for line in lines:
            self.add(line.encode("utf-8", "surrogatepass") + b"\n")
            yield line

    def to_json(self) -> dict[str, Any]:
        """The sum as files keep it: ``lines``, ``bytes`` and ``sha256``."""
        return {"lines": self.lines, "bytes": self.bytes, "sha256": self._hash.hexdigest()}


def checked(lines: Iterable[str], expected: Mapping[str, Any] | None, path: str) -> Iterator[str]:
    """The lines of a file, streamed; at their end they are compared with what was written.

    :param expected: What :meth:`Summing.to_json` said of them; ``None``: nobody summed them.
    :raises StagingDamaged: If they differ, or the file is not there, or is no text.
    """
    summing = Summing()
    try:
        yield from summing.through(lines)
    except FileNotFoundError:
        raise StagingDamaged(f"{path} is not there") from None
    except UnicodeError as error:
        raise StagingDamaged(f"{path} is no text: {error}") from None
    if expected is None:
        return
    found = summing.to_json()
    if found["lines"] != expected["lines"]:
        raise StagingDamaged(
            f"{path} holds {found['lines']} lines, and {expected['lines']} were written"
        )
    if found["sha256"] != expected["sha256"]:
        raise StagingDamaged(f"{path} is not as it was written: its SHA-256 differs")


def sealed(value: Mapping[str, Any], **dumping: Any) -> str:
    """``value`` as JSON, with its seal."""
    text = json.dumps({**value, "seal": ""}, **dumping)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # No string in it can look so: its quotes are escaped.
    return _EMPTY.sub(rf'\g<1>{digest}"', text, count=1)


def check_seal(text: str, path: str) -> None:
    """Return if the text is as it was sealed, or bears no seal.

    :raises StagingDamaged: Otherwise.
    """
    found = _SEAL.search(text)
    if found is None:
        return
    start, stop = found.span(1)
    if hashlib.sha256((text[:start] + text[stop:]).encode()).hexdigest() != found[1]:
        raise StagingDamaged(f"{path} is not as it was written: its seal is broken")
