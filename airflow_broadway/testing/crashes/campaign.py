"""A campaign: enumerates the cases of a pipeline, runs them concurrently, and adds up results."""

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
from airflow_broadway.testing.crashes.account import ACKED, Account
from airflow_broadway.testing.crashes.case import Case, Recovery, Result, run_case
from airflow_broadway.testing.crashes.points import Fault, Injection, Point
from airflow_broadway.testing.crashes.subject import Subject

#: Creates a subject in an empty folder.
MakeSubject = Callable[[Path], Subject]


class Family(StrEnum):
    """A family of cases."""

    #: A task is killed before a call with effects, halfway through it, or after it.
    CRASHES = "crashes"
    #: The recovery is killed as well; or two recoveries run concurrently.
    PAIRS = "pairs"
    #: A task that was considered dead resumes after others have recovered.
    ZOMBIES = "zombies"
    #: A call fails, times out, or loses its response; the disk is full, or the clock jumps.
    FAULTS = "faults"


_FAULTS: Mapping[Family, tuple[Fault, ...]] = {
    Family.CRASHES: (Fault.KILLED_BEFORE, Fault.KILLED_HALFWAY, Fault.KILLED_AFTER),
    Family.ZOMBIES: (Fault.SUSPENDED_BEFORE, Fault.SUSPENDED_AFTER),
    Family.FAULTS: (
        Fault.ERROR,
        Fault.RESPONSE_LOST,
        Fault.TIME_OUT,
        Fault.SENT_TWICE,
        Fault.CONFLICT,
        Fault.STALE,
        Fault.DISK_FULL,
        Fault.CLOCK_AHEAD,
        Fault.CLOCK_BEHIND,
    ),
}
#: Faults that are possible at some calls only.
_OPTIONAL = (
    Fault.KILLED_HALFWAY,
    Fault.TIME_OUT,
    Fault.SENT_TWICE,
    Fault.CONFLICT,
    Fault.STALE,
    Fault.DISK_FULL,
)
#: A fault does not kill the task: it succeeds or fails itself, and Airflow retries it.
_RECOVERIES: Mapping[Family, tuple[Recovery, ...]] = {
    Family.CRASHES: tuple(r for r in Recovery if r is not Recovery.SIDE_BY_SIDE),
    Family.ZOMBIES: (Recovery.RETRY, Recovery.NEXT_RUN, Recovery.LAPSE),
    Family.FAULTS: (Recovery.RETRY,),
}


class UnsoundPipeline(BroadwayError):
    """A pipeline does not balance without faults.

    :param log: The log of its tasks.
    """

    def __init__(self, text: str, log: Path | None = None) -> None:
        super().__init__(text)
        self.log = log
        #: The last lines of the log, which may be removed.
        self.tail: list[str] = []
        if log is not None:
            self.tail = log.read_text(errors="replace").splitlines()[-20:]


class Baseline(NamedTuple):
    """A run without faults.

    :param points: The calls of the first run, in order: without traffic, and with it.
    :param account: The account of its messages.
    :param unsteady: Calls that are not made in every run, and are not points.
    """

    points: tuple[list[Point], list[Point]]
    account: Account
    unsteady: list[Point]


@dataclass
class Totals:
    """The totals of a campaign.

    :param points: Distinct points at which faults were injected.
    :param parts: Counts by stage and kind of call of the first fault: its points, the cases, the
        failed ones, and each kind of violation.
    """

    points: set[Point] = field(default_factory=set)
    runs: int = 0
    parts: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    failures: list[Result] = field(default_factory=list)
    #: Calls that are not made in every run, and were skipped.
    unsteady: list[Point] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def counts(self) -> Counter[str]:
        """The counts of all parts together."""
        return sum(self.parts.values(), Counter())

    @property
    def cases(self) -> int:
        return self.counts["cases"]


class Campaign:
    """Injects faults into one pipeline at every point of its first run.

    :param make: Creates a subject.
    :param bodies: The messages.
    :param folder: The folder for the cases; fastest in memory.  The files of successful cases are
        removed.
    """

    def __init__(self, make: MakeSubject, bodies: Sequence[bytes], folder: Path) -> None:
        self._make = make
        self._bodies = list(bodies)
        self._folder = folder
        self._baseline: Baseline | None = None

    def baseline(self) -> Baseline:
        """Runs the pipeline without faults, once.

        :raises UnsoundPipeline: If messages are lost or repeated even then.
        """
        if self._baseline is None:
            first = self._run_sound(Case())  # warms up imports
            alone = self._run_sound(Case())
            if first.account.rows != alone.account.rows:
                raise UnsoundPipeline(_unstable_rows(first.account.rows, alone.account.rows))
            busy, busy_again = (
                self._run_sound(Case(traffic=True)),
                self._run_sound(Case(traffic=True)),
            )
            self._check_some_succeed(alone)
            if alone.account.outcomes != busy.account.outcomes:
                raise UnsoundPipeline("the outcome of a message depends on when it is sent")
            if alone.account.rows != busy.account.rows:
                text = _unstable_rows(alone.account.rows, busy.account.rows)
                raise UnsoundPipeline(f"{text}; the second time, messages were sent one by one")
            steady, odd = zip(
                _stable_points(first, alone), _stable_points(busy_again, busy), strict=True
            )
            self._baseline = Baseline(steady, alone.account, [*odd[0], *odd[1]])
        return self._baseline

    def _check_some_succeed(self, result: Result) -> None:
        account = result.account
        if ACKED not in account.outcomes.values():
            reason = f" ({account.reasons[0]})" if account.reasons else ""
            raise UnsoundPipeline(
                f"without any fault, all {len(account.outcomes)} messages failed{reason}:"
                " use messages that this pipeline can handle"
            )

    def _run_sound(self, case: Case) -> Result:
        result = self.run(case)
        if not result.passed:
            text = "; ".join(result.account.lines[:3])
            raise UnsoundPipeline(f"failed without any fault: {text}", result.folder / "log.txt")
        return result

    def run(self, case: Case) -> Result:
        """Runs one case; removes its folder if it succeeded."""
        baseline = self._baseline
        folder = Path(tempfile.mkdtemp(prefix="case-", dir=self._folder))
        subject = self._make(folder)
        try:
            result = run_case(subject, self._bodies, case, baseline and baseline.account)
        finally:
            subject.close()
        if result.passed:
            shutil.rmtree(folder)
        return result

    # -- cases -----------------------------------------------------------------------------------

    def cases(
        self,
        families: Iterable[Family],
        *,
        share: float = 1.0,
        pairs: int = 0,
        seed: int = 1,
        all_callbacks: bool = False,
        tasks: Collection[str] = (),
    ) -> list[Case]:
        """Returns the cases of families.

        :param share: The share of all cases except pairs, 0 to 1.  The next seed selects the next
            cases, one of each point before a second one, so that all cases are covered in time.
        :param pairs: The number of cases with two faults.
        :param all_callbacks: Whether to include all cases at callbacks, and at calls within them,
            regardless of the share.
        :param tasks: Only these tasks get the first fault; all by default.
        """
        selected: list[Case] = []
        singles: list[Case] = []
        for family in families:
            if family is Family.PAIRS:
                selected += self._pairs(pairs, random.Random(seed), tasks)
            else:
                singles += self._singles(family, tasks)
        if all_callbacks:
            selected += [case for case in singles if case.injections[0].point.traits.in_callback]
            singles = [case for case in singles if not case.injections[0].point.traits.in_callback]
        if share < 1:
            singles = _select_share(singles, round(len(singles) * share), seed)
        return [*singles, *selected]

    def parse_case(self, text: str) -> Case:
        """Parses a case.

        :raises ValueError: If the text is invalid, or this pipeline does not have its first point.
        """
        case = Case.parse(text)
        (first, fault), *rest = case.injections
        points = self.baseline().points[case.traffic]
        for point in points:
            if point[:3] == first[:3] and _is_distinct(point, fault):
                return case._replace(injections=(Injection(point, fault), *rest))
        baseline = list(dict.fromkeys(map(str, points)))
        near = get_close_matches(str(first), baseline, n=1, cutoff=0.0)
        raise ValueError(
            f"{first}: {fault.value} cannot be, for this pipeline has no such point; the nearest of"
            f" its {len(baseline)} points is {near[0]}"
        )

    def _singles(self, family: Family, tasks: Collection[str]) -> Iterator[Case]:
        alone, busy = (
            [point for point in points if not tasks or point.execution.split("/")[1] in tasks]
            for points in self.baseline().points
        )
        # With traffic, one recovery per point, in rotation.
        recoveries = cycle(_RECOVERIES[family])
        for points, traffic in ((alone, False), (busy, True)):
            for point in points:
                for fault in _FAULTS[family]:
                    if _is_distinct(point, fault):
                        recoveries_here = [next(recoveries)] if traffic else _RECOVERIES[family]
                        for recovery in recoveries_here:
                            yield Case((Injection(point, fault),), recovery, traffic)

    def _pairs(self, count: int, rng: random.Random, tasks: Collection[str]) -> Iterator[Case]:
        """Yields cases with a second fault in the recovery; every other one with two recoveries."""
        singles = list(self._singles(Family.CRASHES, tasks))
        for number in range(count):
            first = rng.choice(singles)
            concurrent = number % 2 == 1
            if concurrent:
                first = first._replace(recovery=Recovery.SIDE_BY_SIDE)
            result = self.run(first)
            first_injected = next((i for i, e in enumerate(result.executions) if e.injected), None)
            after = [
                point
                for execution in result.executions[(first_injected or 0) + 1 :]
                if execution.name.startswith(("two/", "three/"))
                or not (concurrent or execution.name.startswith(("after/", "last/")))
                for point in execution.points
                if point.traits.changes
            ]
            if not after:
                continue
            point = rng.choice(after)
            before = Fault.SUSPENDED_BEFORE if concurrent else Fault.KILLED_BEFORE
            faults = (before, Fault.KILLED_AFTER, Fault.SUSPENDED_AFTER)
            fault = rng.choice([fault for fault in faults if _is_distinct(point, fault)])
            yield first._replace(injections=(*first.injections, Injection(point, fault)))

    # -- execution -------------------------------------------------------------------------------

    def run_cases(
        self,
        cases: Sequence[Case],
        *,
        jobs: int = 1,
        on_result: Callable[[Result], None] = lambda result: None,
    ) -> Totals:
        """Runs cases; returns their totals.

        :param jobs: The number of concurrent processes.
        """
        totals = Totals(unsteady=self.baseline().unsteady)
        began = time.monotonic()
        # Keeps pages shared with the forks by avoiding garbage collection.
        gc.collect()
        gc.freeze()
        try:
            for result in self._results(cases, jobs):
                _add(totals, result)
                on_result(result)
        finally:
            gc.unfreeze()
        totals.seconds = time.monotonic() - began
        return totals

    def _results(self, cases: Sequence[Case], jobs: int) -> Iterator[Result]:
        if jobs == 1:
            yield from map(self.run, cases)
            return
        _campaigns.append(self)  # inherited by the forked workers
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            # In order, so that the report does not depend on the number of workers.
            yield from pool.imap(_run, cases, chunksize=4)


#: The last entry is the campaign of this process's workers.
_campaigns: list[Campaign] = []


def _run(case: Case) -> Result:
    return _campaigns[-1].run(case)


def _select_share(cases: Sequence[Case], count: int, index: int) -> list[Case]:
    """Returns the n-th portion of the cases; every point comes once before any comes twice."""
    mixed = random.Random(len(cases)).sample(cases, len(cases))  # the same order in every turn
    nth: Counter[tuple[object, ...]] = Counter()
    ranked: list[tuple[int, Case]] = []
    for case in mixed:
        point = case.injections[0].point[:3]
        ranked.append((nth[point], case))
        nth[point] += 1
    ranked.sort(key=itemgetter(0))
    return [ranked[(index * count + number) % len(ranked)][1] for number in range(count)]


def _stable_points(one: Result, other: Result) -> tuple[list[Point], list[Point]]:
    """Returns the calls that both first runs have, and the calls that only one has."""
    points, other_points = _first_run(one), _first_run(other)
    keys, other_keys = {point[:3] for point in points}, {point[:3] for point in other_points}
    return (
        [point for point in other_points if point[:3] in keys],
        [point for point in [*points, *other_points] if point[:3] in keys ^ other_keys],
    )


def _unstable_rows(one: Counter[str] | None, other: Counter[str] | None) -> str:
    one, other = one or Counter(), other or Counter()
    [row, *_] = sorted((one - other) | (other - one))
    return (
        "the sink has other rows in each run, even without faults: exclude values that differ from"
        " run to run, such as batch_id, a timestamp or a random key; the first such row is"
        f" {row}"
    )


def _first_run(result: Result) -> list[Point]:
    return [
        point
        for execution in result.executions
        if execution.name.startswith("one/")
        for point in execution.points
    ]


def _is_distinct(point: Point, fault: Fault) -> bool:
    """Returns whether the fault differs from one at the previous or next call."""
    traits = point.traits
    if fault is Fault.SUSPENDED_BEFORE:
        return traits.changes and not traits.locked_before
    if fault is Fault.SUSPENDED_AFTER:
        return not traits.locked_after
    if fault in _OPTIONAL:
        return fault.value in traits.faults.split(",")
    return traits.changes or fault in (Fault.ERROR, Fault.CLOCK_AHEAD, Fault.CLOCK_BEHIND)


def _add(totals: Totals, result: Result) -> None:
    totals.runs += len({execution.name.split("/")[0] for execution in result.executions})
    first = result.case.injections[0].point
    stage = first.execution.split("/")[1].partition("!")[0]  # without the index of a mapped task
    part = totals.parts.setdefault((stage, first.call.kind), Counter())
    part.update(
        {kind.name.lower(): len(texts) for kind, texts in result.account.violations.items()}
    )
    part.update(cases=1, points=int(first not in totals.points), failed=int(not result.passed))
    totals.points.update(injection.point for injection in result.case.injections)
    if not result.passed:
        totals.failures.append(result)
