"""Claims: which generation holds which range of a partition, in small files in staging.

A run claims a partition before it hands out a message, and holds it alone until the run is settled.
Below the pipeline's staging folder, in ``kafka/<digest of cluster and group>/``::

    owner.json                           a random id of this staging folder, kept in commits too
    starts.json                          where a new group began in each partition
    claims/<topic>/<partition>/<version>.json    the highest version counts
    backfill/<digest of a run>/<topic>/…         the same of a backfill
    letters/<topic>/<partition>/…                which dead letters are finished
    <digest of a generation>/            its log (see producers.kit.generation_log), and in it
        now-*.json                       what callbacks settled immediately
        lease.json                       the deadline as last renewed
        ended.json                       nothing more is claimed in its name

A version is never changed.  A change reads the newest version and creates the next one exclusively:
of two that claim together, one does.  Without a staging folder all of it is in this process's
memory.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.version import known_fields
from airflow_broadway.producers.kafka.offsets import Ranges, normal
from airflow_broadway.producers.kit.generation_log import GenerationLog
from airflow_broadway.producers.kit.state_files import (
    MemoryFiles,
    StateFiles,
    day_of,
    digest,
    state_files,
)

#: A topic and a partition.
Place = tuple[str, int]

#: Seconds after a lease's end from which on others take over its claims: clocks differ.
GRACE_SECONDS: Final = 30.0
#: Versions of a claim from which on the older ones are removed, and how many are kept.
_MOST_VERSIONS, _KEPT_VERSIONS = 10, 2
#: Conflicts after which a change gives up: others write without end, or the store is broken.
_MOST_CONFLICTS: Final = 1000
_VERSION: Final = 3

_memory: dict[str, MemoryFiles] = {}
_memory_lock = threading.Lock()


class Failed(NamedTuple):
    """A message that waits in the log to be retried.

    :param attempts: Recorded failures.
    :param not_before: Seconds since the epoch before which it is not handed out.
    :param group: The group in which it keeps its order, where that is a key.
    """

    attempts: int
    not_before: float = 0.0
    group: str = ""


class Decision(NamedTuple):
    """The verdict on one message.

    :param not_before: Seconds since the epoch before which it is not handed out again.
    :param attempt: The attempt that has ended, from 1.
    :param group: The group in which it keeps its order, where that is a key.
    :param moved: Whether it was sent to the retry topic.
    """

    action: Action
    not_before: float = 0.0
    attempt: int = 1
    group: str = ""
    message_id: str = ""
    moved: bool = False

    @property
    def stays(self) -> bool:
        """Whether the message comes again from where it is in the log."""
        return self.action in COMES_AGAIN and not self.moved


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A partition as the newest version describes it.

    :param start: The first offset that is not finished: of a claim, the group's offset when it was
        made; of a partition that nobody holds, the offset as last committed.
    :param generation: The generation that holds the partition; ``""``: none.
    :param end: The offset behind the claimed range.
    :param until: The end of the lease as known when the claim was made.
    :param marked: The offset behind the last that was claimed before: a message below it is
        redelivered.
    :param done: Offsets beyond ``start`` that are finished.
    :param failed: Offsets beyond ``start`` that wait to be retried.
    :param settled: The generations whose settlement is in it, the last few.
    :param topic_id: The topic's id; ``""`` where the broker gives none.
    :param epoch: The leader's epoch of the last message that was read; -1: not known.
    :param limit: The end of a backfill; -1: none.
    """

    start: int
    generation: str = ""
    end: int = 0
    until: float = 0.0
    marked: int = 0
    done: Ranges = ()
    failed: Mapping[int, Failed] = field(default_factory=dict)
    settled: tuple[str, ...] = ()
    topic_id: str = ""
    epoch: int = -1
    limit: int = -1

    @property
    def high(self) -> int:
        """The offset behind the last that was ever claimed."""
        return max(self.marked, self.end)

    def freed(self, **changes: Any) -> Claim:
        """Returns the partition once nobody holds it any more."""
        return replace(self, generation="", end=0, until=0.0, **changes)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that :meth:`from_json` reads back."""
        default = vars(Claim(start=0))
        changed = {name: value for name, value in vars(self).items() if value != default[name]}
        return {"v": _VERSION, **changed}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Claim:
        """Reads what :meth:`to_json` wrote.

        :raises ValueError: If another release wrote it.
        """
        if value.get("v") != _VERSION:
            raise ValueError(f"format version {value.get('v')!r}; this release reads {_VERSION}")
        failed = {int(offset): Failed(*row) for offset, row in value.get("failed", {}).items()}
        done, settled = normal(value.get("done", ())), tuple(value.get("settled", ()))
        known = {"start": 0, **known_fields(cls, value)}
        return cls(**known | {"failed": failed, "done": done, "settled": settled})


def name_of(place: Place) -> str:
    """Returns a partition's name, for people and in leases."""
    return f"{place[0]}-{place[1]}"


def place_named(name: str) -> Place:
    """Returns the partition of a name that :func:`name_of` made."""
    topic, _, partition = name.rpartition("-")
    return topic, int(partition)


def group_files(staging: str | None, cluster: str, group: str) -> StateFiles:
    """Returns the files of a group.

    :param staging: The pipeline's folder, as a URI; ``None``: in this process's memory.
    """
    key = digest(f"{cluster}\n{group}")
    if staging is not None:
        return state_files(staging, f"kafka/{key}")
    with _memory_lock:
        return _memory.setdefault(key, MemoryFiles())


class Claims:
    """The claims of one group; used from one thread.

    :param folder: The folder of the claims: a backfill has its own.
    :raises StagingError: From every method, if files cannot be read or written.
    """

    def __init__(self, files: StateFiles, clock: Clock, folder: str = "claims") -> None:
        self._files = files
        self._clock = clock
        self._folder = folder
        #: Version and claim as last read or written here.
        self._known: dict[Place, tuple[int, Claim | None]] = {}

    @property
    def durable(self) -> bool:
        """Whether other processes see the files."""
        return self._files.durable

    def owner(self, *, write: bool = True) -> str:
        """Returns the id of this staging folder; ``""`` where it has none and none is written."""
        known = self._files.read("owner.json")
        if known is None and write:
            self._files.create("owner.json", {"id": uuid.uuid4().hex[:16]})
            known = self._files.read("owner.json")
        return "" if known is None else str(known["id"])

    def starts(self) -> dict[Place, int] | None:
        """Returns where a new group began in each partition; ``None``: not recorded."""
        value = self._files.read("starts.json")
        return value and {place_named(name): offset for name, offset in value.items()}

    def start_at(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        """Records where a new group begins; the first record stands."""
        value = {name_of(place): offset for place, offset in offsets.items()}
        return dict(offsets) if self._files.create("starts.json", value) else self.starts() or {}

    def generation(self, generation: str) -> GenerationFiles:
        """Returns the files of one generation."""
        return GenerationFiles(self._files, generation, self._clock)

    # -- claims --------------------------------------------------------------------------------

    def read(self, place: Place) -> Claim | None:
        """Returns the newest version; ``None`` if there is none."""
        folder = self._path(place)
        for _ in range(10):
            names = self._versions(folder)
            if not names:
                self._known[place] = 0, None
                return None
            if len(names) > _MOST_VERSIONS:
                self._files.discard(f"{folder}/{name}" for name in names[:-_KEPT_VERSIONS])
            value = self._files.read(f"{folder}/{names[-1]}")
            if value is not None:  # else it was superseded, and removed
                claim = _parsed(place, value)
                self._known[place] = int(names[-1][:-5]), claim
                return claim
        raise StagingError(f"{folder} cannot be read: its files vanish while they are read")

    def replace(self, place: Place, known: Claim | None, claim: Claim) -> bool:
        """Creates the next version, where the newest is the one that was last read or written here.

        :param known: The claim that was read.
        :returns: Whether it is the newest now; if not, another process was faster.
        """
        if place not in self._known:
            self.read(place)
        number, newest = self._known[place]
        if newest != known:
            return False
        name, folder = f"{number + 1:012d}.json", self._path(place)
        # The newest is never removed: a process that slept may create an old version once more, and
        # finds a newer one.
        created = self._files.create(f"{folder}/{name}", claim.to_json())
        if created and self._versions(folder)[-1:] == [name]:
            self._known[place] = number + 1, claim
            return True
        del self._known[place]
        return False

    def change(self, place: Place, compute: Callable[[Claim | None], Claim | None]) -> Claim | None:
        """Creates the next version, also while other processes do so.

        :param compute: From the newest version to the next one; called again if another process
            was faster.  ``None``: nothing is written.
        :returns: The result of ``compute``.
        """
        for _ in range(_MOST_CONFLICTS):
            known = self.read(place)
            claim = compute(known)
            if claim is None or claim == known or self.replace(place, known, claim):
                return claim
        raise StagingError(
            f"the claim of {name_of(place)} could not be written: {_MOST_CONFLICTS} times"
            " another process was faster; find out which other processes use this staging folder"
        )

    def end(self, place: Place, generation: str, after: Claim) -> None:
        """Ends a generation's claim.

        :param after: The partition as it is then.
        """
        self.change(place, lambda c: after if c and c.generation == generation else None)

    def held_until(self, claim: Claim | None, now: float) -> float:
        """Returns the end of the lease under which a partition is held; 0: nobody holds it."""
        if claim is None or not claim.generation:
            return 0.0
        until = claim.until
        if now >= until + GRACE_SECONDS:
            until = max(until, self.generation(claim.generation).deadline() or 0.0)
        return until if now < until + GRACE_SECONDS else 0.0

    def _versions(self, folder: str) -> list[str]:
        return [name for name in self._files.names(folder) if name[:-5].isdecimal()]

    def _path(self, place: Place) -> str:
        return f"{self._folder}/{place[0]}/{place[1]}"


class GenerationFiles:
    """The lease and the log of one generation."""

    def __init__(self, files: StateFiles, generation: str, clock: Clock) -> None:
        self._files = files
        self._generation = generation
        self._clock = clock
        self.log = GenerationLog(files, generation)
        self._lease, self._ended = self.log.path("lease.json"), self.log.path("ended.json")

    def deadline(self) -> float | None:
        """Returns the end of the lease as last written; ``None``: never written."""
        value = self._files.read(self._lease)
        return None if value is None else float(value["deadline"])

    def run(self) -> str:
        """Returns the run of the generation, for people."""
        owner = (self._files.read(self._lease) or {}).get("owner", {})
        names = [str(owner[name]) for name in ("dag_id", "run_id") if owner.get(name)]
        return f"the run {' '.join(names)}" if names else f"generation {self._generation}"

    def hold(self, deadline: float, owner: Mapping[str, Any]) -> None:
        """Writes down the end of the lease.

        :param owner: The run, for people.
        """
        self._files.write(self._lease, {"deadline": deadline, "owner": dict(owner)})

    def note_now(self, decisions: Mapping[Place, Mapping[int, Decision]]) -> None:
        """Records what callbacks settled immediately."""
        rows = [
            [*place, offset, *decision]
            for place, by_offset in decisions.items()
            for offset, decision in by_offset.items()
        ]
        if rows:
            self.log.append("now", rows)

    def now(self) -> dict[Place, dict[int, Decision]]:
        """Returns what callbacks settled immediately."""
        decisions: dict[Place, dict[int, Decision]] = {}
        for topic, partition, offset, action, *rest in self.rows("now"):
            place = topic, partition
            decisions.setdefault(place, {})[offset] = Decision(Action(action), *rest)
        return decisions

    def rows(self, kind: str, *, but: str = "") -> list[list[Any]]:
        """Returns the rows of all files of one kind, without those of one file."""
        names = [n for n in self.log.names() if n.startswith(f"{kind}-") and n != but]
        return [row for name in names for row in self.log.read(name)]

    def plan(self) -> dict[str, Any] | None:
        """Returns the settlement that was decided; ``None`` if none was."""
        value = self._files.read(self.log.path("begun.json"))
        return None if value is None else value["plan"]

    def planned(self, place: Place) -> Claim | None:
        """Returns a partition after the settlement that was decided; ``None`` if none was."""
        row = (self.plan() or {"places": {}})["places"].get(name_of(place))
        return row and _parsed(place, row[1])

    def end(self) -> None:
        """Records that nothing more is claimed in its name.  Safe to repeat."""
        self._files.create(self._ended, {})

    def ended(self) -> bool:
        """Whether nothing more may be claimed in its name."""
        return self._files.exists(self._ended)

    def forget_soon(self) -> None:
        """Lets its files be removed once they were kept for long enough."""
        day = day_of(self._clock.now())
        self._files.write(f"ended/{day}/{self.log.folder}.json", {})


def _parsed(place: Place, value: Any) -> Claim:
    try:
        return Claim.from_json(value)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StagingError(
            f"the claim of {name_of(place)} in staging cannot be read ({error}): use the"
            " release of airflow-broadway that wrote it"
        ) from None
