"""Progress of a running process task: until its manifest there is no other record.

For display only: it may be lost at any time, and nothing depends on it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.formats import paths
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.version import known_fields

log = logging.getLogger(__name__)

#: Seconds between two updates; a shorter task writes none.
LIVE_INTERVAL: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCounts:
    """A process task's progress.

    :param at: When it was reported.
    :param received: Messages; ``received_bytes`` is the total of their payloads.
    :param failed: How many of them have failed so far.
    :param batchers: Batcher → messages staged for it so far.
    :param deadline: The lease's deadline, as last renewed.
    """

    at: datetime
    received: int
    received_bytes: int
    failed: int
    batchers: Mapping[str, int]
    deadline: datetime

    def dumps(self) -> str:
        """Returns it as JSON."""
        times = {"at": self.at.isoformat(), "deadline": self.deadline.isoformat()}
        return json.dumps({**asdict(self), **times, "version": VERSION})


class LiveSign:
    """Writes the progress of one generation; used from one thread."""

    def __init__(self, files: Files, generation: str, clock: Clock) -> None:
        self._files = files
        self._path = paths.live(generation)
        self._clock = clock
        self._next = clock.monotonic() + LIVE_INTERVAL

    def leave(self, counts: Callable[[], LiveCounts]) -> None:
        """Writes the progress if it is due; a failed write is skipped."""
        now = self._clock.monotonic()
        if now < self._next:
            return
        self._next = now + LIVE_INTERVAL
        try:
            self._files.replace(self._path, counts().dumps())
        except StagingError as error:
            log.info("Could not write this task's progress: %s", error)


def read_live(files: Files, generation: str) -> LiveCounts | None:
    """Reads a process task's latest progress; ``None`` if there is none or it cannot be read."""
    try:
        value: dict[str, Any] = json.loads(files.read(paths.live(generation)))
        if value.pop("version") != VERSION:
            return None
        times = {name: datetime.fromisoformat(value[name]) for name in ("at", "deadline")}
        return LiveCounts(**known_fields(LiveCounts, {**value, **times}))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
