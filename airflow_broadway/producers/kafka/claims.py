"""Stores the claims of generations on ranges of partitions, as small files in staging.

A run claims a partition before it delivers a message, and holds it exclusively until it is settled.
Below the pipeline's staging folder, in ``kafka/<digest of cluster and group>/``::

    owner.json                           a random id of this staging folder, also in commits
    starts.json                          the start offset of a new group in each partition
    claims/<topic>/<partition>/<version>.json    the highest version is current
    backfill/<digest of a run>/<topic>/…         the claims of a backfill
    letters/<topic>/<partition>/…                the offsets of finished dead letters
    <digest of a generation>/            its log (see producers.kit.generation_log), with
        now-*.json                       messages that callbacks settled immediately
        lease.json                       the deadline as last renewed
        ended.json                       the generation claims nothing more

A version is immutable.  A change reads the newest version and creates the next one exclusively, so
that one of two concurrent claims succeeds.  Without a staging folder all of it is in this process's
memory.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import StagingError
from airflow_broadway.producers.kafka.settling import Claim, Decision
from airflow_broadway.producers.kit.generation_log import GenerationLog
from airflow_broadway.producers.kit.state_files import (
    MemoryFiles,
    StateFiles,
    digest,
    state_files,
)

#: A topic and a partition.
Place = tuple[str, int]

#: Seconds after a lease's deadline before its claims are taken over; allows for clock skew.
GRACE_SECONDS: Final = 30.0
#: The number of versions of a claim above which old ones are removed, and the number kept.
_MOST_VERSIONS, _KEPT_VERSIONS = 10, 2
#: Conflicts after which a change fails: other writers never pause, or the store is broken.
_MOST_CONFLICTS: Final = 1000
#: The format version of a mark.
_MARK_VERSION: Final = 2
_LEASE, _ENDED = "lease.json", "ended.json"

_memory: dict[str, MemoryFiles] = {}
_memory_lock = threading.Lock()


class Committed(NamedTuple):
    """The committed offset of a partition, with the mark in its offset metadata.

    :param owner: The id of the staging folder that committed it; ``""``: another program.
    :param high: The end of all ranges claimed so far, exclusive.
    :param until: The lease deadline of the claim; 0: the partition is free.
    """

    offset: int
    owner: str = ""
    high: int = 0
    until: float = 0.0

    @classmethod
    def of(cls, claim: Claim, owner: str, *, durable: bool = True) -> Committed:
        """Builds the commit of a claim's start offset."""
        held = claim.generation and durable
        return cls(claim.start, owner, claim.high, round(claim.until) if held else 0.0)

    @classmethod
    def read(cls, offset: int, metadata: str) -> Committed:
        """Parses the offset metadata of a committed offset."""
        try:
            mark = json.loads(metadata)
            if mark["b"] == _MARK_VERSION:
                return cls(offset, str(mark["o"]), int(mark["h"]), float(mark.get("u", 0)))
        except (ValueError, KeyError, TypeError):
            pass  # the metadata of another program
        return cls(offset)

    @property
    def metadata(self) -> str:
        """The mark as offset metadata."""
        mark = {"b": _MARK_VERSION, "o": self.owner, "h": self.high}
        until = {"u": self.until} if self.until else {}
        return json.dumps({**mark, **until}, separators=(",", ":"))


def places_of(topics: Mapping[str, Sequence[int]]) -> list[Place]:
    """Returns the partitions of topics, sorted."""
    return sorted((topic, number) for topic, numbers in topics.items() for number in numbers)


def name_of(place: Place) -> str:
    """Returns a partition's name, for messages and leases."""
    return f"{place[0]}-{place[1]}"


def place_named(name: str) -> Place:
    """Parses a partition's name, the inverse of :func:`name_of`."""
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

    def __init__(self, files: StateFiles, folder: str = "claims") -> None:
        self._files = files
        self._folder = folder
        #: Version and claim as last read or written by this object.
        self._known: dict[Place, tuple[int, Claim | None]] = {}

    @property
    def durable(self) -> bool:
        """Whether other processes can read the files."""
        return self._files.durable

    def owner(self, *, write: bool = True) -> str:
        """Returns the id of this staging folder; ``""`` if it has none and ``write`` is false."""
        known = self._files.read("owner.json")
        if known is None and write:
            self._files.create("owner.json", {"id": uuid.uuid4().hex[:16]})
            known = self._files.read("owner.json")
        return "" if known is None else str(known["id"])

    def starts(self) -> dict[Place, int] | None:
        """Returns the recorded start offsets of a new group; ``None``: not recorded."""
        value = self._files.read("starts.json")
        return value and {place_named(name): offset for name, offset in value.items()}

    def start_at(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        """Records the start offsets of a new group; returns the first record."""
        value = {name_of(place): offset for place, offset in offsets.items()}
        return dict(offsets) if self._files.create("starts.json", value) else self.starts() or {}

    def generation(self, generation: str) -> GenerationFiles:
        """Returns the files of one generation."""
        return GenerationFiles(self._files, generation)

    # -- claims --------------------------------------------------------------------------------

    def read(self, place: Place) -> Claim | None:
        """Returns the newest version; ``None`` if there is none."""
        return self._newest(place)[1]

    def _newest(self, place: Place) -> tuple[int, Claim | None]:
        folder = self._path(place)
        for _ in range(10):
            names = self._versions(folder)
            if not names:
                self._known[place] = 0, None
                return self._known[place]
            if len(names) > _MOST_VERSIONS:
                self._files.discard(f"{folder}/{name}" for name in names[:-_KEPT_VERSIONS])
            value = self._files.read(f"{folder}/{names[-1]}")
            if value is not None:  # otherwise it was superseded and removed
                self._known[place] = int(names[-1][:-5]), _parse_claim(place, value)
                return self._known[place]
        raise StagingError(f"{folder} cannot be read: its files vanish while they are read")

    def replace(self, place: Place, known: Claim | None, claim: Claim) -> bool:
        """Creates the next version of the claim last read or written by this object.

        :param known: The claim that was read or written.
        :returns: Whether the new version was created; if not, another process was faster.
        """
        number, newest = self._known.get(place) or self._newest(place)
        return newest == known and self._create_version(place, number + 1, claim)

    def _create_version(self, place: Place, number: int, claim: Claim) -> bool:
        name, folder = f"{number:012d}.json", self._path(place)
        # The newest version is never removed, so a suspended process that creates a removed version
        # again finds a newer one.
        created = self._files.create(f"{folder}/{name}", claim.to_json())
        if created and self._versions(folder)[-1:] == [name]:
            self._known[place] = number, claim
            return True
        del self._known[place]
        return False

    def change(self, place: Place, compute: Callable[[Claim | None], Claim | None]) -> Claim | None:
        """Creates the next version, and retries on conflicts with other processes.

        :param compute: Computes the next version from the newest one; called again if another
            process was faster.  If it returns ``None``, nothing is written.
        :returns: The result of ``compute``.
        """
        for _ in range(_MOST_CONFLICTS):
            number, known = self._newest(place)
            claim = compute(known)
            if claim is None or claim == known or self._create_version(place, number + 1, claim):
                return claim
        raise StagingError(
            f"the claim of {name_of(place)} could not be written: {_MOST_CONFLICTS} times"
            " another process was faster; find out which other processes use this staging folder"
        )

    def end(self, place: Place, generation: str, after: Claim) -> None:
        """Ends a generation's claim.

        :param after: The resulting state of the partition.
        """
        self.change(place, lambda c: after if c and c.generation == generation else None)

    def held_until(self, claim: Claim | None, now: float) -> float:
        """Returns the deadline of the lease under which a partition is held; 0: it is free."""
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


class GenerationFiles(GenerationLog):
    """The lease and the log of one generation."""

    def deadline(self) -> float | None:
        """Returns the lease deadline as last written; ``None``: never written."""
        value = self._files.read(self.path(_LEASE))
        return None if value is None else float(value["deadline"])

    def run(self) -> str:
        """Returns a description of the generation's run; ``""``: unknown."""
        owner = (self._files.read(self.path(_LEASE)) or {}).get("owner", {})
        names = [str(owner[name]) for name in ("dag_id", "run_id") if owner.get(name)]
        return f"the run {' '.join(names)}" if names else ""

    def hold(self, deadline: float, owner: Mapping[str, Any]) -> None:
        """Records the lease deadline.

        :param owner: The run, for :meth:`run`.
        """
        self.write(_LEASE, {"deadline": deadline, "owner": dict(owner)})

    def note_decisions(self, decisions: Mapping[Place, Mapping[int, Decision]]) -> None:
        """Records the decisions that callbacks carried out immediately."""
        rows = [
            [*place, offset, *decision]
            for place, by_offset in decisions.items()
            for offset, decision in by_offset.items()
        ]
        if rows:
            self.append("now", rows)

    def decisions(self) -> dict[Place, dict[int, Decision]]:
        """Returns the decisions that callbacks carried out immediately."""
        decisions: dict[Place, dict[int, Decision]] = {}
        for topic, partition, offset, action, *rest in self.rows("now"):
            place = topic, partition
            decisions.setdefault(place, {})[offset] = Decision(Action(action), *rest)
        return decisions

    def rows(self, kind: str, *, but: str = "") -> list[list[Any]]:
        """Returns the rows of all files of one kind except the file ``but``."""
        names = [name for name in self.names() if name.startswith(f"{kind}-") and name != but]
        return [row for name in names for row in self.read(name)]

    def plan(self) -> dict[str, Any] | None:
        """Returns the recorded plan of the settlement; ``None`` if there is none."""
        value = self._files.read(self.path("begun.json"))
        return None if value is None else value["plan"]

    def planned(self, place: Place) -> Claim | None:
        """Returns a partition's state after the planned settlement; ``None`` if there is none."""
        row = (self.plan() or {"places": {}})["places"].get(name_of(place))
        return row and _parse_claim(place, row[1])

    def end_claims(self) -> None:
        """Records that the generation claims nothing more.  Safe to repeat."""
        self._files.create(self.path(_ENDED), {})

    def ended(self) -> bool:
        """Returns whether the generation may claim nothing more."""
        return self._files.exists(self.path(_ENDED))


def _parse_claim(place: Place, value: Any) -> Claim:
    try:
        return Claim.from_json(value)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise StagingError(
            f"the claim of {name_of(place)} in staging cannot be read ({error}): use the"
            " release of airflow-broadway that wrote it"
        ) from None
