"""The tables of one group, changed by compare-and-set, and the leases of those who hold offsets.

Below the pipeline's staging folder, in ``kafka/<digest of cluster and group>/``::

    owner.json                          whose the group is: a random id, which Kafka keeps a copy of
    starts.json                         where the group began in each partition, when it was new
    tables/<topic>/<partition>/<version>.json     the table; the highest version counts
    backfill/<digest of a run>/<topic>/…          the same of a backfill
    <digest of a generation>/           its log (see producers.kit.generation_log), and in it
        lease.json                      until when it holds what it holds, as last renewed
        ended.json                      nothing more is taken in its name

A table is never changed: a change reads the newest, computes, and creates the next version, which
fails if somebody else has done so.  Then it begins again.  Versions that are superseded are kept
for an hour, and nobody goes by what it read more than ten minutes ago: so a writer who slept never
creates a version that was removed.

Without a staging folder all of it is in this process's memory.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kafka.table import Table
from airflow_broadway.producers.kit.generation_log import GenerationLog, forget_ended
from airflow_broadway.producers.kit.state_files import (
    MemoryFiles,
    StateFiles,
    day_of,
    digest,
    state_files,
)

__all__ = ["GRACE_SECONDS", "GenerationFiles", "Register", "Version", "group_files"]

log = logging.getLogger(__name__)

T = TypeVar("T")
#: A topic and a partition.
Place = tuple[str, int]

#: Seconds after a lease's end from which on others take what it held: clocks differ.
GRACE_SECONDS: Final = 30.0
#: Seconds for which what was read of a table is good enough to build upon.
_FRESH_SECONDS: Final = 600.0
#: Seconds for which a superseded version is kept.
_KEPT_SECONDS: Final = 3600.0
#: Seconds between two versions whose instants a table remembers.
_TRAIL_INTERVAL: Final = 300.0
#: Days for which the report of a settled generation is kept.
_KEPT_DAYS: Final = 7
#: Conflicts after which a change gives up: others write without end, or the store is broken.
_MOST_CONFLICTS: Final = 1000

_memory: dict[str, MemoryFiles] = {}
_memory_lock = threading.Lock()


def group_files(staging: str | None, cluster: str, group: str) -> StateFiles:
    """The files of a group.

    :param staging: The pipeline's folder, as a URI; ``None``: in this process's memory.
    """
    key = digest(f"{cluster}\n{group}")
    if staging is not None:
        return state_files(staging, f"kafka/{key}")
    with _memory_lock:
        return _memory.setdefault(key, MemoryFiles())


class Version:
    """A table as it was read."""

    __slots__ = ("at", "number", "table")

    def __init__(self, number: int, table: Table | None, at: float) -> None:
        self.number = number
        self.table = table
        self.at = at


class Register:
    """The tables of one group; used from one thread.

    :param folder: Where the tables are: a backfill has its own.
    :raises StagingError: From every method, if files cannot be read or written.
    """

    def __init__(self, files: StateFiles, clock: Clock, folder: str = "tables") -> None:
        self._files = files
        self._clock = clock
        self._tables = folder
        self._known: dict[Place, Version] = {}

    @property
    def durable(self) -> bool:
        """Whether other processes see it."""
        return self._files.durable

    def owner(self) -> str:
        """Whose the group is, by this staging folder; ``""`` where there is none."""
        if not self._files.durable:
            return ""
        known = self.owner_if_known()
        if known is not None:
            return known
        made = uuid.uuid4().hex[:16]
        if self._files.create("owner.json", {"id": made}):
            return made
        return str(self._files.read("owner.json")["id"])

    def owner_if_known(self) -> str | None:
        """Whose the group is, by this staging folder; ``None``: it never kept it."""
        value = self._files.read("owner.json")
        return None if value is None else str(value["id"])

    def starts(self) -> dict[Place, int] | None:
        """Where a group that was new began, in each partition; ``None``: nobody has said."""
        value = self._files.read("starts.json")
        if value is None:
            return None
        return {(topic, partition): offset for topic, partition, offset in value}

    def start_at(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        """Say where a new group begins; what was said first stands."""
        value = [[*place, offset] for place, offset in sorted(offsets.items())]
        return dict(offsets) if self._files.create("starts.json", value) else self.starts() or {}

    def generation(self, generation: str) -> GenerationFiles:
        """The files of one generation."""
        return GenerationFiles(self._files, generation, self._clock)

    def forget(self) -> None:
        """Remove reports that were kept for long enough."""
        forget_ended(self._files, day_of(self._clock.now(), before=_KEPT_DAYS))

    # -- tables --------------------------------------------------------------------------------

    def read(self, place: Place) -> Table | None:
        """The table as it is now; ``None`` if there is none."""
        return self._read(place).table

    def known(self, place: Place) -> Table | None:
        """The table as it was last read or written here."""
        version = self._known.get(place)
        return self.read(place) if version is None else version.table

    def version(self, place: Place) -> int:
        """The number of the version that was last read or written here."""
        version = self._known.get(place)
        return 0 if version is None else version.number

    def change(self, place: Place, compute: Callable[[Table | None], tuple[Table, T]]) -> T:
        """Change a table, whoever else does so too.

        :param compute: From the table as it is to what it shall be, and a result; asked again if
            somebody else was faster.  The same table again: nothing is written.
        """
        known = self._known.get(place)
        now = self._clock.now().timestamp()
        newest = known is None or now - known.at > _FRESH_SECONDS
        if known is None or newest:
            known = self._read(place)
        for _ in range(_MOST_CONFLICTS):
            table, result = compute(known.table)
            if table is known.table and newest:
                return result
            if table is known.table:
                # Only a write finds out that somebody else wrote; that there is nothing to write
                # must not be said of an old version.
                known, newest = self._read(place), True
                continue
            number = known.number + 1
            table = _remembering(table, number, self._clock.now().timestamp())
            if self._files.create(f"{self._folder(place)}/{number:012d}.json", table.to_json()):
                at = self._clock.now().timestamp()
                self._known[place] = Version(number, table, at)
                return result
            known, newest = self._read(place), True
        raise StagingError(
            f"the table of {place[0]}-{place[1]} could not be written: {_MOST_CONFLICTS} times"
            " somebody else was faster; look who else uses this staging folder"
        )

    def prune(self, place: Place) -> None:
        """Remove versions that were superseded an hour ago."""
        version = self._known.get(place)
        if version is None or version.table is None:
            return
        oldest = self._clock.now().timestamp() - _KEPT_SECONDS
        good = [number for number, at in version.table.trail if at < oldest]
        if good:
            folder = self._folder(place)
            names = [name for name in self._files.names(folder) if _number(name) < good[-1]]
            self._files.discard(f"{folder}/{name}" for name in names)

    def _folder(self, place: Place) -> str:
        return f"{self._tables}/{place[0]}/{place[1]}"

    def _read(self, place: Place) -> Version:
        folder = self._folder(place)
        for _ in range(10):
            names = [name for name in self._files.names(folder) if _number(name)]
            at = self._clock.now().timestamp()
            if not names:
                version = Version(0, None, at)
                break
            value = self._files.read(f"{folder}/{names[-1]}")
            if value is not None:  # else it was superseded, and removed
                version = Version(_number(names[-1]), self._table(place, value), at)
                break
        else:
            raise StagingError(f"{folder} cannot be read: its files vanish while they are read")
        self._known[place] = version
        return version

    @staticmethod
    def _table(place: Place, value: Any) -> Table:
        try:
            return Table.from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise StagingError(
                f"the table of {place[0]}-{place[1]} in staging cannot be read ({error}): use the"
                " release of airflow-broadway that wrote it"
            ) from None


class GenerationFiles:
    """Until when a generation holds, and what became of it."""

    def __init__(self, files: StateFiles, generation: str, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self.log = GenerationLog(files, generation)
        self._lease = self.log.path("lease.json")
        self._ended = self.log.path("ended.json")

    def deadline(self) -> float | None:
        """Until when it holds, as last written; ``None``: nobody wrote."""
        value = self._files.read(self._lease)
        return None if value is None else float(value["deadline"])

    def owner(self) -> dict[str, Any]:
        """Who it is, as last written; empty: nobody wrote."""
        value = self._files.read(self._lease)
        return {} if value is None else dict(value.get("owner", {}))

    def hold(self, deadline: float, owner: Mapping[str, Any]) -> None:
        """Write down until when it holds.

        :param owner: Who it is, for people.
        """
        self._files.write(self._lease, {"deadline": deadline, "owner": dict(owner)})

    def end(self) -> None:
        """Nothing more is taken in its name.  Safe to repeat."""
        self._files.create(self._ended, {})

    def ended(self) -> bool:
        """Whether nothing more is to be taken in its name."""
        return self._files.exists(self._ended)

    def forget_soon(self) -> None:
        """Remove its files once they were kept for long enough."""
        day = day_of(self._clock.now())
        self._files.write(f"ended/{day}/{self.log.folder}.json", {})


def _number(name: str) -> int:
    stem = name.removesuffix(".json")
    return int(stem) if stem.isdecimal() else 0


def _remembering(table: Table, number: int, now: float) -> Table:
    """The table with its own instant, if its last one is old, and without those not needed."""
    trail = table.trail
    if trail and now - trail[-1][1] < _TRAIL_INTERVAL:
        return table
    # One of those that are old enough is kept: it says what may be removed.
    old = [each for each in trail if each[1] < now - _KEPT_SECONDS]
    kept = trail[len(old) - 1 :] if old else trail
    return replace(table, trail=(*kept, (number, now)))
