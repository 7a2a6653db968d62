"""Every point of a run, struck: which cases there are, running them side by side, and the sums."""

from __future__ import annotations

import gc
import multiprocessing
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from airflow_broadway.testing.crashes.case import Case, Recovery, Result, run_case
from airflow_broadway.testing.crashes.points import Point, Strike, What
from airflow_broadway.testing.crashes.subject import Subject

__all__ = ["Campaign", "Failure", "Family", "Sums", "Unharmed", "UnsoundPipeline"]

#: Makes a subject in a folder that is empty and its own.
MakeSubject = Callable[[Path], Subject]


class Family(StrEnum):
    """Cases of one kind."""

    #: A task dies before a call that changes the world, halfway through it, and after it.
    CRASHES = "crashes"
    #: The recovery from a death dies as well, somewhere.
    PAIRS = "pairs"
    #: A task that is taken for dead wakes up after others have recovered from its death.
    ZOMBIES = "zombies"
    #: A call fails, its answer is lost, the disk is full, the clock jumps.
    FAULTS = "faults"


_STRIKES: Mapping[Family, tuple[What, ...]] = {
    Family.CRASHES: (What.KILLED_BEFORE, What.KILLED_HALFWAY, What.KILLED_AFTER),
    Family.ZOMBIES: (What.ASLEEP_BEFORE, What.ASLEEP_AFTER),
    Family.FAULTS: (
        What.ERROR,
        What.ANSWER_LOST,
        What.DISK_FULL,
        What.CLOCK_AHEAD,
        What.CLOCK_BEHIND,
    ),
}
#: A fault is no death: the task itself says whether it failed, and Airflow tries it again.
_RECOVERIES: Mapping[Family, tuple[Recovery, ...]] = {
    Family.CRASHES: tuple(Recovery),
    Family.ZOMBIES: (Recovery.RETRY, Recovery.NEXT_RUN, Recovery.LAPSE),
    Family.FAULTS: (Recovery.RETRY,),
}


class UnsoundPipeline(Exception):
    """A pipeline does not even balance when nothing is struck."""


class Unharmed(NamedTuple):
    """What a run is like where nothing is struck.

    :param points: The calls of the first run, in order: without traffic, and with it.
    :param fates: What becomes of each message, by its place.
    """

    points: tuple[list[Point], list[Point]]
    fates: dict[int, str]


class Failure(NamedTuple):
    """A case that did not come out well.

    :param lines: What is wrong, in sentences.
    :param folder: Its files, for a look.
    """

    case: Case
    lines: list[str]
    folder: str


@dataclass
class Sums:
    """What a campaign found.

    :param points: Different points that were struck.
    """

    points: set[Point] = field(default_factory=set)
    cases: int = 0
    runs: int = 0
    lost: int = 0
    unmarked: int = 0
    left: int = 0
    mistakes: int = 0
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.failures


class Campaign:
    """Strikes one pipeline at every point of its first run.

    :param make: Makes a subject.
    :param bodies: The messages.
    :param folder: Where the cases work; a folder in memory is fastest.  Those that come out well
        are removed.
    """

    def __init__(self, make: MakeSubject, bodies: Sequence[bytes], folder: Path) -> None:
        self._make = make
        self._bodies = list(bodies)
        self._folder = folder
        self._unharmed: Unharmed | None = None

    def unharmed(self) -> Unharmed:
        """Run without a strike.

        :raises UnsoundPipeline: If that loses or repeats a message already.
        """
        if self._unharmed is None:
            self._sound(Case())  # imports what the next ones need not
            alone, busy = self._sound(Case()), self._sound(Case(traffic=True))
            if alone.account.fates != busy.account.fates:
                raise UnsoundPipeline("what becomes of a message depends on when it is sent")
            self._unharmed = Unharmed((_first_run(alone), _first_run(busy)), alone.account.fates)
        return self._unharmed

    def _sound(self, case: Case) -> Result:
        result, folder = self.run(case)
        if not result.good:
            told = "; ".join(result.account.lines[:3])
            raise UnsoundPipeline(f"without any crash already: {told}; see {folder}/log.txt")
        return result

    def run(self, case: Case) -> tuple[Result, Path]:
        """Run one case; its folder is removed if it came out well."""
        fates = None if self._unharmed is None else self._unharmed.fates
        folder = Path(tempfile.mkdtemp(prefix="case-", dir=self._folder))
        subject = self._make(folder)
        try:
            result = run_case(subject, self._bodies, case, fates)
        finally:
            subject.close()
        if result.good:
            shutil.rmtree(folder)
        return result, folder

    # -- which cases -----------------------------------------------------------------------------

    def cases(
        self, families: Iterable[Family], *, share: float = 1.0, pairs: int = 0, seed: int = 1
    ) -> list[Case]:
        """The cases of families.

        :param share: Of all but the pairs, 0 to 1: chosen by the seed, the same each time.
        :param pairs: How many pairs of strikes.
        """
        chance = random.Random(seed)
        found: list[Case] = []
        for family in families:
            if family is Family.PAIRS:
                found += self._pairs(pairs, chance)
                continue
            whole = list(self._singles(family))
            found += whole if share >= 1 else chance.sample(whole, round(len(whole) * share))
        return found

    def _singles(self, family: Family) -> Iterator[Case]:
        alone, busy = self.unharmed().points
        # With traffic one recovery a point will do, each in turn.
        recoveries = cycle(_RECOVERIES[family])
        for points, traffic in ((alone, False), (busy, True)):
            for point in points:
                for what in _STRIKES[family]:
                    if _means_something(point, what):
                        chosen = [next(recoveries)] if traffic else _RECOVERIES[family]
                        for recovery in chosen:
                            yield Case((Strike(point, what),), recovery, traffic)

    def _pairs(self, count: int, chance: random.Random) -> Iterator[Case]:
        """A first strike, and a second in an execution that recovers from it."""
        singles = list(self._singles(Family.CRASHES))
        for _ in range(count):
            first = chance.choice(singles)
            result, _ = self.run(first)
            begun = next((i for i, each in enumerate(result.executions) if each.struck), None)
            after = [
                point
                for each in result.executions[(begun if begun is not None else 0) + 1 :]
                if not each.name.startswith("last/")
                for point in each.seen
                if point.traits.changes
            ]
            if not after:
                continue
            point = chance.choice(after)
            whats = (What.KILLED_BEFORE, What.KILLED_AFTER, What.ASLEEP_AFTER)
            what = chance.choice([what for what in whats if _means_something(point, what)])
            yield first._replace(strikes=(*first.strikes, Strike(point, what)))

    # -- running them ----------------------------------------------------------------------------

    def strike(
        self,
        cases: Sequence[Case],
        *,
        jobs: int = 1,
        on_result: Callable[[Result], None] = lambda result: None,
    ) -> Sums:
        """Run cases, and sum up.

        :param jobs: Processes at work at once.
        """
        self.unharmed()
        sums = Sums()
        began = time.monotonic()
        # What is shared with the forks stays shared if no collection touches it.
        gc.collect()
        gc.freeze()
        try:
            for result, folder in self._results(cases, jobs):
                _add(sums, result, folder)
                on_result(result)
        finally:
            gc.unfreeze()
        sums.seconds = time.monotonic() - began
        return sums

    def _results(self, cases: Sequence[Case], jobs: int) -> Iterator[tuple[Result, Path]]:
        if jobs == 1:
            yield from map(self.run, cases)
            return
        _at_work.append(self)  # the workers are forks, and have it
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            yield from pool.imap_unordered(_run, cases, chunksize=4)


#: The last is the campaign that the workers of this process are at work for.
_at_work: list[Campaign] = []


def _run(case: Case) -> tuple[Result, Path]:
    return _at_work[-1].run(case)


def _first_run(result: Result) -> list[Point]:
    return [
        point
        for execution in result.executions
        if execution.name.startswith("one/")
        for point in execution.seen
    ]


def _means_something(point: Point, what: What) -> bool:
    """Whether a strike there is another than one at the call before or after it."""
    traits = point.traits
    if what is What.KILLED_HALFWAY:
        return traits.divides
    if what is What.ASLEEP_BEFORE:
        return traits.changes and not traits.locked_before
    if what is What.ASLEEP_AFTER:
        return not traits.locked_after
    if what is What.DISK_FULL:
        return traits.room
    return traits.changes or what in (What.ERROR, What.CLOCK_AHEAD, What.CLOCK_BEHIND)


def _add(sums: Sums, result: Result, folder: Path) -> None:
    sums.cases += 1
    sums.runs += len({each.name.split("/")[0] for each in result.executions})
    sums.points.update(strike.point for strike in result.case.strikes)
    sums.lost += len(result.account.lost)
    sums.unmarked += len(result.account.unmarked)
    sums.left += len(result.account.left)
    sums.mistakes += len(result.account.mistakes) + (not result.reached)
    if not result.good:
        lines = list(result.account.lines)
        if not result.reached:
            lines.append("the point was not reached: this pipeline is not the same in every run")
        sums.failures.append(Failure(result.case, lines, str(folder)))
