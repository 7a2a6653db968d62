"""What a process task says of itself while it is at work: before its manifest nothing else tells.

For people who look at the run.  Nothing depends on it, and it may be lost at any time.
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
from airflow_broadway.core.formats.files import Files
from airflow_broadway.core.formats.layout import VERSION, paths
from airflow_broadway.core.version import known_fields

log = logging.getLogger(__name__)

#: Seconds between two signs; a task that ends sooner leaves none.
LIVE_INTERVAL: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCounts:
    """What a process task has done so far.

    :param at: When it said so.
    :param received: Messages; ``received_bytes`` those of their payloads together.
    :param failed: Of these, failed so far.
    :param batchers: Batcher → messages staged for it so far.
    :param deadline: Until when the messages are held, as last renewed.
    """

    at: datetime
    received: int
    received_bytes: int
    failed: int
    batchers: Mapping[str, int]
    deadline: datetime

    def dumps(self) -> str:
        """Return it as JSON."""
        times = {"at": self.at.isoformat(), "deadline": self.deadline.isoformat()}
        return json.dumps({**asdict(self), **times, "version": VERSION})


class LiveSign:
    """Leaves the signs of one generation; used from one thread."""

    def __init__(self, files: Files, generation: str, clock: Clock) -> None:
        self._files = files
        self._path = paths.live(generation)
        self._clock = clock
        self._next = clock.monotonic() + LIVE_INTERVAL

    def leave(self, counts: Callable[[], LiveCounts]) -> None:
        """Leave one if it is time; one that cannot be written is passed over."""
        now = self._clock.monotonic()
        if now < self._next:
            return
        self._next = now + LIVE_INTERVAL
        try:
            self._files.replace(self._path, counts().dumps())
        except StagingError as error:
            log.info("Could not say how far this task is: %s", error)


def read_live(files: Files, generation: str) -> LiveCounts | None:
    """What a process task last said; ``None`` if nothing that can be read."""
    try:
        value: dict[str, Any] = json.loads(files.read(paths.live(generation)))
        if value.pop("version") != VERSION:
            return None
        times = {name: datetime.fromisoformat(value[name]) for name in ("at", "deadline")}
        return LiveCounts(**known_fields(LiveCounts, {**value, **times}))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
