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
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kafka.offsets import Ranges, normal
from airflow_broadway.producers.kit.generation_log import GenerationLog, forget_ended
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
#: Days for which the report of a settled generation is kept.
_KEPT_DAYS: Final = 7
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

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that :meth:`from_json` reads back."""
        failed = {str(offset): each for offset, each in self.failed.items()}
        given = {name: getattr(self, name) for name in _PLAIN} | {"failed": failed}
        default = Claim(start=0)
        kept = {name: each for name, each in given.items() if each != getattr(default, name)}
        return {"v": _VERSION, **kept}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Claim:
        """Reads what :meth:`to_json` wrote.

        :raises ValueError: If another release wrote it.
        """
        if value.get("v") != _VERSION:
            raise ValueError(f"format version {value.get('v')!r}; this release reads {_VERSION}")
        given = {name: value[name] for name in _PLAIN if name in value}
        failed = {int(offset): Failed(*each) for offset, each in value.get("failed", {}).items()}
        given |= {"done": normal(value.get("done", ())), "settled": tuple(value.get("settled", ()))}
        return cls(**{"start": 0, **given}, failed=failed)


_PLAIN: Final = (
    *(
        "start",
        "generation",
        "end",
        "until",
        "marked",
        "done",
        "settled",
        "topic_id",
        "epoch",
        "limit",
    ),
)


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
            made = {"id": uuid.uuid4().hex[:16]}
            known = made if self._files.create("owner.json", made) else None
            known = known or self._files.read("owner.json")
        return "" if known is None else str(known["id"])

    def starts(self) -> dict[Place, int] | None:
        """Returns where a new group began in each partition; ``None``: not recorded."""
        value = self._files.read("starts.json")
        if value is None:
            return None
        return {(topic, partition): offset for topic, partition, offset in value}

    def start_at(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        """Records where a new group begins; the first record stands."""
        value = [[*place, offset] for place, offset in sorted(offsets.items())]
        return dict(offsets) if self._files.create("starts.json", value) else self.starts() or {}

    def generation(self, generation: str) -> GenerationFiles:
        """Returns the files of one generation."""
        return GenerationFiles(self._files, generation, self._clock)

    def forget(self) -> None:
        """Removes reports that were kept for long enough."""
        forget_ended(self._files, day_of(self._clock.now(), before=_KEPT_DAYS))

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

    def known(self, place: Place) -> Claim | None:
        """Returns the newest version as last read or written here."""
        return self._known[place][1] if place in self._known else self.read(place)

    def change(
        self,
        place: Place,
        compute: Callable[[Claim | None], Claim | None],
        *,
        fresh: bool = True,
    ) -> Claim | None:
        """Creates the next version, whoever else does so too.

        :param compute: From the newest version to the next one; called again if another process
            was faster.  ``None``: nothing is written.
        :param fresh: Whether to read the newest version first, and not to build on the one that was
            last read or written here.
        :returns: What was written.
        """
        if fresh:
            self._known.pop(place, None)
        for _ in range(_MOST_CONFLICTS):
            if place not in self._known:
                self.read(place)
            number, claim = self._known[place]
            made = compute(claim)
            if made is None or made == claim:
                return made
            name, folder = f"{number + 1:012d}.json", self._path(place)
            # The newest is never removed: a process that slept may create an old version anew,
            # and finds a newer one.
            if self._files.create(f"{folder}/{name}", made.to_json()) and self._versions(folder)[
                -1:
            ] == [name]:
                self._known[place] = number + 1, made
                return made
            del self._known[place]
        raise StagingError(
            f"the claim of {place[0]}-{place[1]} could not be written: {_MOST_CONFLICTS} times"
            " another process was faster; find out which other processes use this staging folder"
        )

    def end(self, place: Place, generation: str, after: Claim) -> None:
        """Ends a generation's claim.

        :param after: The partition as it is then.
        """
        self.change(place, lambda c: after if c and c.generation == generation else None)

    def holder(self, claim: Claim | None, now: float, *, but: str = "") -> tuple[str, float] | None:
        """Returns the generation that holds a partition, and the end of its lease.

        :param but: This generation does not count.
        :returns: ``None`` if none does, or its lease is over.
        """
        if claim is None or claim.generation in ("", but):
            return None
        until = claim.until
        if now >= until + GRACE_SECONDS:
            until = max(until, self.generation(claim.generation).deadline() or 0.0)
        return (claim.generation, until) if now < until + GRACE_SECONDS else None

    def _versions(self, folder: str) -> list[str]:
        return [name for name in self._files.names(folder) if name[:-5].isdecimal()]

    def _path(self, place: Place) -> str:
        return f"{self._folder}/{place[0]}/{place[1]}"


class GenerationFiles:
    """The lease and the log of one generation."""

    def __init__(self, files: StateFiles, generation: str, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self.log = GenerationLog(files, generation)
        self._lease = self.log.path("lease.json")
        self._ended = self.log.path("ended.json")

    def deadline(self) -> float | None:
        """Returns the end of the lease as last written; ``None``: never written."""
        value = self._files.read(self._lease)
        return None if value is None else float(value["deadline"])

    def owner(self) -> dict[str, Any]:
        """Returns the run that the generation is of, as last written; empty: never written."""
        value = self._files.read(self._lease)
        return {} if value is None else dict(value.get("owner", {}))

    def hold(self, deadline: float, owner: Mapping[str, Any]) -> None:
        """Writes down the end of the lease.

        :param owner: The run, for people.
        """
        self._files.write(self._lease, {"deadline": deadline, "owner": dict(owner)})

    def note_now(self, decisions: Mapping[Place, Mapping[int, Decision]]) -> None:
        """Records what callbacks settled immediately."""
        rows = [
            [*place, offset, *each]
            for place, found in decisions.items()
            for offset, each in found.items()
        ]
        if rows:
            self.log.append("now", rows)

    def now(self) -> dict[Place, dict[int, Decision]]:
        """Returns what callbacks settled immediately."""
        found: dict[Place, dict[int, Decision]] = {}
        for name in self.log.names():
            if name.startswith("now-"):
                for topic, partition, offset, action, *rest in self.log.read(name):
                    decision = Decision(Action(action), *rest)
                    found.setdefault((topic, partition), {})[offset] = decision
        return found

    def plan(self) -> dict[str, Any] | None:
        """Returns the settlement that was decided; ``None`` if none was."""
        value = self._files.read(self.log.path("begun.json"))
        return None if value is None else value["plan"]

    def planned(self, place: Place) -> Claim | None:
        """Returns a partition after the settlement that was decided; ``None`` if none was."""
        plan = self.plan() or {}
        for topic, partition, _, after, *_ in plan.get("places", ()):
            if (topic, partition) == place:
                return _parsed(place, after)
        return None

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
            f"the claim of {place[0]}-{place[1]} in staging cannot be read ({error}): use the"
            " release of airflow-broadway that wrote it"
        ) from None
