"""Every point of a run, struck: which cases there are, running them side by side, and the sums."""

from __future__ import annotations

import gc
import multiprocessing
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.testing.crashes.account import ACKED, Wrong
from airflow_broadway.testing.crashes.case import Case, Recovery, Result, run_case
from airflow_broadway.testing.crashes.points import Point, Strike, What
from airflow_broadway.testing.crashes.subject import Subject

#: Makes a subject in a folder that is empty and its own.
MakeSubject = Callable[[Path], Subject]


class Family(StrEnum):
    """Cases of one kind."""

    #: A task dies before a call that changes the world, halfway through it, and after it.
    CRASHES = "crashes"
    #: The recovery from a death dies as well, somewhere; or two recover at once.
    PAIRS = "pairs"
    #: A task that is taken for dead wakes up after others have recovered from its death.
    ZOMBIES = "zombies"
    #: A call fails, hangs, or its answer is lost; the disk is full, the clock jumps.
    FAULTS = "faults"


_STRIKES: Mapping[Family, tuple[What, ...]] = {
    Family.CRASHES: (What.KILLED_BEFORE, What.KILLED_HALFWAY, What.KILLED_AFTER),
    Family.ZOMBIES: (What.ASLEEP_BEFORE, What.ASLEEP_AFTER),
    Family.FAULTS: (
        What.ERROR,
        What.ANSWER_LOST,
        What.TIME_OUT,
        What.SENT_TWICE,
        What.CONFLICT,
        What.STALE,
        What.DISK_FULL,
        What.CLOCK_AHEAD,
        What.CLOCK_BEHIND,
    ),
}
#: A fault is no death: the task itself says whether it failed, and Airflow tries it again.
_RECOVERIES: Mapping[Family, tuple[Recovery, ...]] = {
    Family.CRASHES: tuple(each for each in Recovery if each is not Recovery.SIDE_BY_SIDE),
    Family.ZOMBIES: (Recovery.RETRY, Recovery.NEXT_RUN, Recovery.LAPSE),
    Family.FAULTS: (Recovery.RETRY,),
}


class UnsoundPipeline(BroadwayError):
    """A pipeline does not even balance when nothing is struck.

    :param log: What its tasks printed.
    """

    def __init__(self, told: str, log: Path | None = None) -> None:
        super().__init__(told)
        self.log = log
        #: The last lines of the log, where the log itself may be gone.
        self.tail: list[str] = []


class Unharmed(NamedTuple):
    """What a run is like where nothing is struck.

    :param points: The calls of the first run, in order: without traffic, and with it.
    :param fates: What becomes of each message, by its place.
    :param rows: What the sink holds; ``None``: there is none to look at.
    :param unsteady: Calls that are not made in every run: they are no points.
    """

    points: tuple[list[Point], list[Point]]
    fates: dict[int, str]
    rows: Counter[str] | None
    unsteady: list[Point]


class Failure(NamedTuple):
    """A case that did not come out well.

    :param lines: What is wrong, in sentences.
    :param folder: Its files, for a look.
    :param wrong: What is wrong, by its kind.
    """

    case: Case
    lines: list[str]
    folder: str
    wrong: dict[Wrong, list[str]]


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
    #: Rows that a sink held too often, and that it did not hold.
    repeated: int = 0
    missing: int = 0
    #: The same by stage and kind of call: of the first strike.
    parts: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    #: Calls that are not made in every run, and so were not struck.
    unsteady: list[Point] = field(default_factory=list)
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
            first = self._sound(Case())  # imports what the next ones need not
            alone = self._sound(Case())
            if first.account.rows != alone.account.rows:
                raise UnsoundPipeline(_other_rows(first.account.rows, alone.account.rows))
            busy, again = self._sound(Case(traffic=True)), self._sound(Case(traffic=True))
            self._check_some_succeed(alone)
            if alone.account.fates != busy.account.fates:
                raise UnsoundPipeline("what becomes of a message depends on when it is sent")
            if alone.account.rows != busy.account.rows:
                told = _other_rows(alone.account.rows, busy.account.rows)
                raise UnsoundPipeline(f"{told}; the second time messages came one by one")
            steady, odd = zip(_steady(first, alone), _steady(again, busy), strict=True)
            self._unharmed = Unharmed(
                steady, alone.account.fates, alone.account.rows, [*odd[0], *odd[1]]
            )
        return self._unharmed

    def _check_some_succeed(self, result: Result) -> None:
        found = result.account
        if ACKED not in found.fates.values():
            reason = f" ({found.reasons[0]})" if found.reasons else ""
            raise UnsoundPipeline(
                f"nothing was struck, and still {len(found.fates)} of {len(found.fates)} messages"
                f" failed{reason}: give messages that this pipeline can handle"
            )

    def _sound(self, case: Case) -> Result:
        result, folder = self.run(case)
        if not result.good:
            told = "; ".join(result.account.lines[:3])
            raise UnsoundPipeline(f"nothing was struck, and still: {told}", folder / "log.txt")
        return result

    def run(self, case: Case) -> tuple[Result, Path]:
        """Run one case; its folder is removed if it came out well."""
        known = self._unharmed
        folder = Path(tempfile.mkdtemp(prefix="case-", dir=self._folder))
        subject = self._make(folder)
        try:
            result = run_case(
                subject,
                self._bodies,
                case,
                None if known is None else known.fates,
                None if known is None else known.rows,
            )
        finally:
            subject.close()
        if result.good:
            shutil.rmtree(folder)
        return result, folder

    # -- which cases -----------------------------------------------------------------------------

    def cases(
        self,
        families: Iterable[Family],
        *,
        share: float = 1.0,
        pairs: int = 0,
        seed: int = 1,
        own: bool = False,
        tasks: Collection[str] = (),
    ) -> list[Case]:
        """The cases of families.

        :param share: Of all but the pairs, 0 to 1.  The next seed has the next cases, and one comes
            of each point before a second one does: so in time all points are struck, and all cases.
        :param pairs: How many pairs of strikes.
        :param own: Whether all at the callbacks, and at the calls that they make, are taken,
            whatever the share.
        :param tasks: Only these are struck first; all unless given.
        """
        found: list[Case] = []
        singles: list[Case] = []
        for family in families:
            if family is Family.PAIRS:
                found += self._pairs(pairs, random.Random(seed), tasks)
            else:
                singles += self._singles(family, tasks)
        if own:
            found += [each for each in singles if each.strikes[0].point.traits.own]
            singles = [each for each in singles if not each.strikes[0].point.traits.own]
        if share < 1:
            singles = _turn(singles, round(len(singles) * share), seed)
        return [*singles, *found]

    def named(self, text: str) -> Case:
        """The case that is written so.

        :raises ValueError: If it is none, or its first point is none of this pipeline's.
        """
        case = Case.parse(text)
        (wanted, what), *rest = case.strikes
        points = self.unharmed().points[case.traffic]
        for point in points:
            if point[:3] == wanted[:3] and _means_something(point, what):
                return case._replace(strikes=(Strike(point, what), *rest))
        known = list(dict.fromkeys(map(str, points)))
        near = get_close_matches(str(wanted), known, n=1, cutoff=0.0)
        raise ValueError(
            f"{wanted}: {what.value} cannot be, for this pipeline has no such point; the nearest of"
            f" its {len(known)} points is {near[0]}"
        )

    def restarts(self, count: int, seed: int = 1) -> list[Case]:
        """Cases in which the broker restarts: so many points, chosen by the seed.

        They are to be struck alone, for all cases share a broker.
        """
        points = [point for point in self.unharmed().points[0] if point.traits.changes]
        chosen = random.Random(seed).sample(points, min(count, len(points)))
        return [Case((Strike(point, What.BROKER_RESTARTS),)) for point in chosen]

    def _singles(self, family: Family, tasks: Collection[str]) -> Iterator[Case]:
        alone, busy = (
            [point for point in points if not tasks or point.execution.split("/")[1] in tasks]
            for points in self.unharmed().points
        )
        # With traffic one recovery a point will do, each in turn.
        recoveries = cycle(_RECOVERIES[family])
        for points, traffic in ((alone, False), (busy, True)):
            for point in points:
                for what in _STRIKES[family]:
                    if _means_something(point, what):
                        chosen = [next(recoveries)] if traffic else _RECOVERIES[family]
                        for recovery in chosen:
                            yield Case((Strike(point, what),), recovery, traffic)

    def _pairs(self, count: int, chance: random.Random, tasks: Collection[str]) -> Iterator[Case]:
        """A first strike, and a second in who recovers: every second time two do, side by side."""
        singles = list(self._singles(Family.CRASHES, tasks))
        for number in range(count):
            first = chance.choice(singles)
            beside = number % 2 == 1
            if beside:
                first = first._replace(recovery=Recovery.SIDE_BY_SIDE)
            result, _ = self.run(first)
            begun = next((i for i, each in enumerate(result.executions) if each.struck), None)
            after = [
                point
                for each in result.executions[(begun if begun is not None else 0) + 1 :]
                if each.name.startswith(("two/", "three/"))
                or not (beside or each.name.startswith(("after/", "last/")))
                for point in each.seen
                if point.traits.changes
            ]
            if not after:
                continue
            point = chance.choice(after)
            before = What.ASLEEP_BEFORE if beside else What.KILLED_BEFORE
            whats = (before, What.KILLED_AFTER, What.ASLEEP_AFTER)
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
        sums = Sums(unsteady=self.unharmed().unsteady)
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
            # In order: a report is the same, however many work.
            yield from pool.imap(_run, cases, chunksize=4)


#: The last is the campaign that the workers of this process are at work for.
_at_work: list[Campaign] = []


def _run(case: Case) -> tuple[Result, Path]:
    return _at_work[-1].run(case)


def _turn(cases: Sequence[Case], count: int, turn: int) -> list[Case]:
    """Whose turn it is, so many cases at a time: first one of each point, then the others."""
    mixed = random.Random(len(cases)).sample(cases, len(cases))  # the same at every turn
    nth: Counter[tuple[object, ...]] = Counter()
    placed: list[tuple[int, Case]] = []
    for case in mixed:
        point = case.strikes[0].point[:3]
        placed.append((nth[point], case))
        nth[point] += 1
    placed.sort(key=itemgetter(0))
    return [placed[(turn * count + each) % len(placed)][1] for each in range(count)]


def _steady(one: Result, other: Result) -> tuple[list[Point], list[Point]]:
    """The calls of the other's first run that one's has too, and those that only one has."""
    there = {point[:3] for point in _first_run(one)}
    here = {point[:3] for point in _first_run(other)}
    return (
        [point for point in _first_run(other) if point[:3] in there],
        [point for point in [*_first_run(one), *_first_run(other)] if point[:3] in there ^ here],
    )


def _other_rows(one: Counter[str] | None, other: Counter[str] | None) -> str:
    one, other = one or Counter(), other or Counter()
    [row, *_] = sorted((one - other) | (other - one))
    return (
        "the sink holds other rows in each run, though nothing was struck: leave out of them what"
        " differs from run to run, such as batch_id, an instant or a random key; the first is"
        f" {row}"
    )


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
    if what is What.TIME_OUT:
        return traits.hangs
    if what in (What.SENT_TWICE, What.CONFLICT, What.STALE):
        return what.value in traits.others.split(",")
    return traits.changes or what in (What.ERROR, What.CLOCK_AHEAD, What.CLOCK_BEHIND)


def _add(sums: Sums, result: Result, folder: Path) -> None:
    wrong = dict(result.account.wrong)
    if not result.reached:
        told = "the point was not reached: this pipeline is not the same in every run"
        wrong[Wrong.OTHER] = [*wrong.get(Wrong.OTHER, []), told]
    counts = Counter({kind.name.lower(): len(told) for kind, told in wrong.items()})
    sums.cases += 1
    sums.runs += len({each.name.split("/")[0] for each in result.executions})
    sums.lost += counts["lost"]
    sums.unmarked += counts["unmarked"]
    sums.left += counts["left"]
    sums.mistakes += counts["other"]
    sums.repeated += counts["repeated"]
    sums.missing += counts["missing"]
    first = result.case.strikes[0].point
    part = sums.parts.setdefault((_stage(first), first.call.kind), Counter())
    part += counts
    part["cases"] += 1
    part["points"] += first not in sums.points
    sums.points.update(strike.point for strike in result.case.strikes)
    if wrong:
        part["failed"] += 1
        lines = [f"{kind.value}: {each}" for kind, told in wrong.items() for each in told]
        sums.failures.append(Failure(result.case, lines, str(folder), wrong))


def _stage(point: Point) -> str:
    """The task of its execution, of several equal ones the first."""
    return point.execution.split("/")[1].partition("!")[0]
