"""The sink: a file to which the callbacks append the messages that they handled.

A line is on disk before the callback returns, and so before its outcome is recorded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class HandledMessage(NamedTuple):
    """A message that a callback has handled.

    :param batch: The batch's id.
    :param run: The run's name.
    """

    number: int
    message_id: str
    attempt: int
    redelivered: bool
    batch: str
    run: str


def record_handled(path: str, lines: Iterable[HandledMessage]) -> None:
    """Appends lines atomically and syncs them to disk."""
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


def read_handled(path: Path) -> list[HandledMessage]:
    """Reads all lines in order."""
    if not path.exists():
        return []
    with path.open() as file:
        return [HandledMessage(*json.loads(line)) for line in file]
