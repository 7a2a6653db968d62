"""Checksums of staged files: recorded when a file is written, verified when it is settled by.

Without them a lost line in a file of entries would turn a failure into a success.  The sum of a
file of lines is in the file that references it.  Manifests, outcomes and headers of plans have a
*seal*: the SHA-256 of their own text with an empty seal.  Other files are read unchecked.
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
    """Sums lines as they pass; a line includes its newline."""

    def __init__(self) -> None:
        self.lines = 0
        self.bytes = 0
        self._hash = hashlib.sha256()

    def add(self, raw: bytes, lines: int = 1) -> None:
        """Adds one or more lines, including their newlines."""
        self.lines += lines
        self.bytes += len(raw)
        self._hash.update(raw)

    def through(self, lines: Iterable[str]) -> Iterator[str]:
        """Yields the same lines, summed."""
        for line in lines:
            self.add(line.encode("utf-8", "surrogatepass") + b"\n")
            yield line

    def to_json(self) -> dict[str, Any]:
        """Returns the sum as stored: ``lines``, ``bytes`` and ``sha256``."""
        return {"lines": self.lines, "bytes": self.bytes, "sha256": self._hash.hexdigest()}


def checked(lines: Iterable[str], expected: Mapping[str, Any] | None, path: str) -> Iterator[str]:
    """Yields a file's lines, streamed, and verifies their sum at the end.

    :param expected: The recorded :meth:`Summing.to_json`; ``None``: the lines are of a sealed file,
        or only for display.
    :raises StagingDamaged: If they differ, or the file is missing, or is not text.
    """
    summing = Summing()
    try:
        yield from summing.through(lines)
    except FileNotFoundError:
        raise StagingDamaged(f"{path} is missing") from None
    except UnicodeError as error:
        raise StagingDamaged(f"{path} is not text: {error}") from None
    if expected is None:
        return
    actual = summing.to_json()
    if actual["lines"] != expected["lines"]:
        raise StagingDamaged(
            f"{path} holds {actual['lines']} lines, and {expected['lines']} were written"
        )
    if actual["sha256"] != expected["sha256"]:
        raise StagingDamaged(f"{path} is not as it was written: its SHA-256 differs")


def sealed(value: Mapping[str, Any], **kwargs: Any) -> str:
    """Returns ``value`` as JSON, with its seal."""
    text = json.dumps({**value, "seal": ""}, **kwargs)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # No string in it can match: its quotes are escaped.
    return _EMPTY.sub(rf'\g<1>{digest}"', text, count=1)


def check_seal(text: str, path: str) -> None:
    """Verifies the text's seal.

    :raises StagingDamaged: If it has none or a wrong one.
    """
    match = _SEAL.search(text)
    start, stop = match.span(1) if match else (0, 0)
    if not match or hashlib.sha256((text[:start] + text[stop:]).encode()).hexdigest() != match[1]:
        raise StagingDamaged(f"{path} is not as it was written: its seal is broken or missing")
