"""Records the number of failures of each message across runs.

A broker's delivery count includes releases and lapses, or does not exist.  So a settlement writes
the failures of the messages that it retries to a file, and a later run that receives them reads it.
The files are in the staging folder that all pipelines share::

    <broker>/<queue>/attempts/<day>.<unique>.json     id → recorded failures

A broker may retain a message for weeks, so there may be tens of thousands of these files.  A run
merges the files of each day when it begins, before it holds any lease.  Later reads then fetch a
few files per day, concurrently if the store supports it.
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

#: Days for which failures are kept beyond the broker's retention.
_SPARE_DAYS: Final = 2
#: The number of files of one day from which they are merged.
_MERGED_FROM: Final = 8
#: Seconds between two reads of failures recorded by other processes.
_LOOK_INTERVAL: Final = 30.0
_FOLDER: Final = "attempts"


class Failures:
    """The recorded failures of one queue's messages; used from one thread.

    :param files: The queue's state files.
    :param kept_days: The broker's maximum retention in days.
    :param look_interval: Seconds between two reads of failures recorded by other processes; listing
        is expensive on object stores.
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
        """Records the number of failures of messages, including the current one.

        :raises StagingError: If they cannot be written.
        """
        if failures:
            self._write(day_of(now), failures)
            _add(self._known, failures)

    def of(self, ids: Iterable[str], now: datetime) -> dict[str, int]:
        """Returns the recorded failures of those of ``ids`` that have any.

        Records of other processes are visible after the next read.

        :raises StagingError: If they cannot be read.
        """
        wanted = list(ids)
        unknown = not all(key in self._known for key in wanted)
        if unknown and now.timestamp() >= self._look_at:
            self._look_at = now.timestamp() + self._interval
            while self._read_new():
                pass  # removed by a concurrent merge, and now in another file
        return {key: self._known[key] for key in wanted if key in self._known}

    def merge(self, now: datetime) -> None:
        """Merges the files of each day into one, and removes expired ones.  Safe to repeat.

        :raises StagingError: If files cannot be read, written or removed.
        """
        days: dict[str, list[str]] = defaultdict(list)
        for name in self._files.names(_FOLDER):
            days[name.partition(".")[0]].append(f"{_FOLDER}/{name}")
        oldest = day_of(now, before=self._kept_days + _SPARE_DAYS)
        for day, paths in days.items():
            if day < oldest:
                self._files.discard(paths)
            elif len(paths) >= _MERGED_FROM:
                read = _read_counts(self._files, paths)
                merged: dict[str, int] = {}
                for counts in read.values():
                    _add(merged, counts)
                # Written before the others are removed: duplicates count once.
                self._write(day, merged)
                self._files.discard(read)

    def _read_new(self) -> bool:
        """Reads new files; returns whether some of them were removed meanwhile."""
        names = (f"{_FOLDER}/{name}" for name in self._files.names(_FOLDER))
        fresh = [path for path in names if path not in self._read]
        self._read.update(fresh)
        read = _read_counts(self._files, fresh)
        for counts in read.values():
            _add(self._known, counts)
        return len(read) < len(fresh)

    def _write(self, day: str, failures: Mapping[str, int]) -> None:
        self._files.write(f"{_FOLDER}/{day}.{uuid.uuid4().hex}.json", dict(failures))


def _add(known: dict[str, int], more: Mapping[str, int]) -> None:
    for message_id, count in more.items():
        known[message_id] = max(count, known.get(message_id, 0))


def _read_counts(files: StateFiles, paths: Iterable[str]) -> dict[str, dict[str, int]]:
    """Reads files by path; damaged ones are empty, and removed ones are omitted."""
    counts: dict[str, dict[str, int]] = {}
    for path, value in files.read_all(paths):
        valid = isinstance(value, dict) and all(isinstance(count, int) for count in value.values())
        if not valid:
            log.error("%s is damaged: what it says of failures is not counted", path)
        counts[path] = value if valid else {}
    return counts
