"""Where the callbacks write down what they handled, outside of the package: a file that only grows.

A line is on disk before the callback returns, so before any outcome is recorded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Handled(NamedTuple):
    """One message that a callback was done with.

    :param batch: The batch's id.
    :param run: In which run.
    """

    number: int
    message_id: str
    attempt: int
    redelivered: bool
    batch: str
    run: str


def note(path: str, lines: Iterable[Handled]) -> None:
    """Writes down, whole or not at all."""
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    if not data:
        return
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        written = os.write(file, data)
        assert written == len(data), "the disk of the sink is full"
        os.fdatasync(file)
    finally:
        os.close(file)


def handled(path: Path) -> list[Handled]:
    """All that was written down, in order."""
    if not path.exists():
        return []
    with path.open() as file:
        return [Handled(*json.loads(line)) for line in file]
