"""How often each message has failed, over all runs: brokers count releases and lapses too, or
nothing at all.

Who settles writes the failures of what it sends back into a file, and a later run that receives
such a message reads them.  Below the staging folder that all pipelines share::

    <broker>/<queue>/attempts/<day>.<unique>.json     id → failures on record

A broker may keep a message for weeks, so there may be tens of thousands of these files.  A run
merges those of a day into one when it begins, while it holds no message whose time runs.  What is
read later is a few files of each day, side by side where the store can.
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Final

from airflow_broadway.producers.kit.state_files import StateFiles, day_of

log = logging.getLogger(__name__)

#: Days for which failures are kept, beyond those for which the broker may keep a message.
_SPARE_DAYS: Final = 2
#: Files of one day from which on they are merged.
_MERGED_FROM: Final = 8
#: Seconds between two looks for failures that others noted.
_LOOK_INTERVAL: Final = 30.0
_FOLDER: Final = "attempts"


class Failures:
    """The failures on record of one queue's messages; used from one thread.

    :param files: The queue's.
    :param kept_days: Days for which the broker may keep a message.
    :param look_interval: Seconds between two looks for failures that others noted; listing is dear
        on object stores.
    """

    def __init__(
        self,
        files: StateFiles,
        kept_days: int,
        *,
        look_interval: float = _LOOK_INTERVAL,
    ) -> None:
        self._files = files
        self._interval = look_interval
        self._kept_days = kept_days
        self._known: dict[str, int] = {}
        self._look_at = 0.0
        self._read: set[str] = set()

    def note(self, failures: Mapping[str, int], now: datetime) -> None:
        """Records how many failures messages have, this one included.

        :raises StagingError: If that cannot be written.
        """
        if failures:
            self._write(day_of(now), failures)
            _add(self._known, failures)

    def of(self, ids: Iterable[str], now: datetime) -> dict[str, int]:
        """Returns the failures on record of those of ``ids`` that have any.

        What others note meanwhile is seen at the next look.

        :raises StagingError: If they cannot be read.
        """
        wanted = list(ids)
        unknown = not all(key in self._known for key in wanted)
        if unknown and now.timestamp() >= self._look_at:
            self._look_at = now.timestamp() + self._interval
            while self._learn():
                pass  # somebody merges meanwhile: what is gone is in another file
        return {key: self._known[key] for key in wanted if key in self._known}

    def merge(self, now: datetime) -> None:
        """Merges a day's many files into one, and removes what is too old.  Safe to repeat.

        :raises StagingError: If that cannot be done.
        """
        days: dict[str, list[str]] = defaultdict(list)
        for name in self._files.names(_FOLDER):
            days[name.partition(".")[0]].append(f"{_FOLDER}/{name}")
        oldest = day_of(now, before=self._kept_days + _SPARE_DAYS)
        for day, paths in days.items():
            if day < oldest:
                self._files.discard(paths)
            elif len(paths) >= _MERGED_FROM:
                read = _counts(self._files, paths)
                merged: dict[str, int] = {}
                for counts in read.values():
                    _add(merged, counts)
                # Written before the others are removed: what is in two files counts once.
                self._write(day, merged)
                self._files.discard(read)

    def _learn(self) -> bool:
        """Reads new files; returns whether some of them were gone before that."""
        names = (f"{_FOLDER}/{name}" for name in self._files.names(_FOLDER))
        fresh = [path for path in names if path not in self._read]
        self._read.update(fresh)
        read = _counts(self._files, fresh)
        for counts in read.values():
            _add(self._known, counts)
        return len(read) < len(fresh)

    def _write(self, day: str, failures: Mapping[str, int]) -> None:
        self._files.write(f"{_FOLDER}/{day}.{uuid.uuid4().hex}.json", dict(failures))


def _add(known: dict[str, int], more: Mapping[str, int]) -> None:
    for message_id, count in more.items():
        known[message_id] = max(count, known.get(message_id, 0))


def _counts(files: StateFiles, paths: Iterable[str]) -> dict[str, dict[str, int]]:
    """Reads files by path: nothing of one that is damaged; what is gone is left out."""
    counts: dict[str, dict[str, int]] = {}
    for path, value in files.read_all(paths):
        whole = isinstance(value, dict) and all(isinstance(count, int) for count in value.values())
        if not whole:
            log.error("%s is damaged: what it says of failures is not counted", path)
        counts[path] = value if whole else {}
    return counts
