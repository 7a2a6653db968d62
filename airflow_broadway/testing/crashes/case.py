"""One case: a run is struck, others recover from it, the queue is drained, and all is counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from airflow_broadway.testing.crashes.account import Account, account
from airflow_broadway.testing.crashes.callbacks import Witnessed, witnessed
from airflow_broadway.testing.crashes.points import Strike
from airflow_broadway.testing.crashes.scheduler import Ended, Execution, Run, Scheduler
from airflow_broadway.testing.crashes.subject import Subject

#: Runs that may be needed to drain the queue.
_RUNS = 12
#: Tries of a task.
_TRIES = 4
#: Seconds after which no file of a run is kept.
_RETENTION = 8 * 24 * 3600.0
#: The file of a run that is not accounted for.
_OPEN = re.compile(r"/_open/[^.][^/]*\.json$")


#: A case as it is written.
_CASE = re.compile(r"(?P<struck>.+?)(?: \[(?P<recovery>[a-z ]+)(?P<traffic>, traffic)?\])?")


class Recovery(StrEnum):
    """How Airflow, or whoever looks after it, goes on after the death of a task."""

    #: The task's next try, and the rest of the run.
    RETRY = "retry"
    #: The task has no try left; the rest of the run goes on without it.
    GIVE_UP = "give up"
    #: The whole run is cleared, and all its tasks are tried again.
    CLEAR = "clear"
    #: The run has failed, nobody looks at it again, and the next one begins.
    NEXT_RUN = "next run"
    #: The run counts as running, but its leases lapse, and the next one begins.
    LAPSE = "lapse"
    #: The run has failed, and two next ones are at work at once.
    SIDE_BY_SIDE = "side by side"


class Case(NamedTuple):
    """What is done to one pipeline.

    :param strikes: Of the first run, and of what recovers from that.
    :param traffic: Whether messages go on coming while runs begin and end.
    """

    strikes: tuple[Strike, ...] = ()
    recovery: Recovery = Recovery.RETRY
    traffic: bool = False

    def __str__(self) -> str:
        struck = ", then ".join(map(str, self.strikes)) or "nothing is struck"
        return f"{struck} [{self.recovery.value}{', traffic' if self.traffic else ''}]"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what :meth:`__str__` wrote; without brackets the recovery is a retry.

        :raises ValueError: If it is none.
        """
        found = _CASE.fullmatch(text.strip())
        if found is None or (found["recovery"] or "retry") not in set(Recovery):
            ways = ", ".join(Recovery)
            raise ValueError(f"expected POINT: WHAT [one of {ways}], got: {text!r}")
        strikes = tuple(map(Strike.parse, found["struck"].split(", then ")))
        return cls(strikes, Recovery(found["recovery"] or "retry"), bool(found["traffic"]))


@dataclass
class Result:
    """What became of a case."""

    case: Case
    account: Account
    executions: list[Execution] = field(default_factory=list)
    #: Whether each strike happened.
    reached: bool = True

    @property
    def good(self) -> bool:
        return self.reached and self.account.good


def run_case(
    subject: Subject,
    bodies: Sequence[bytes],
    case: Case,
    fates: Mapping[int, str] | None,
    rows: Counter[str] | None = None,
) -> Result:
    """Run one case on a subject that is new.

    :param bodies: The messages.
    :param fates: What becomes of each, by its place, where nothing is struck; ``None``: learn it.
    :param rows: What the sink holds then; ``None``: learn it, or there is none to look at.
    """
    return _Case(subject, bodies, case).run(fates, rows)


class _Case:
    def __init__(self, subject: Subject, bodies: Sequence[bytes], case: Case) -> None:
        self._subject = subject
        self._case = case
        self._scheduler = Scheduler(subject, case.strikes)
        self._bodies = list(bodies)
        self._ids: list[str] = []
        self._mistakes: list[str] = []

    def run(self, fates: Mapping[int, str] | None, rows: Counter[str] | None) -> Result:
        try:
            return self._run(fates, rows)
        finally:
            self._scheduler.close()

    def _run(self, fates: Mapping[int, str] | None, rows: Counter[str] | None) -> Result:
        scheduler = self._scheduler
        self._subject.prepare()
        self._publish(len(self._bodies) // 2 if self._case.traffic else len(self._bodies))
        one = scheduler.run("one")
        self._first(one)
        self._wake_all()
        one.over = True
        self._publish(len(self._bodies))
        self._drain()
        self._forget()
        failing = {each.point.execution for each in self._case.strikes if each.fails_callbacks}
        found = account(self._subject, self._ids, fates, rows, failing)
        found.mistakes += self._mistakes
        struck = {each.name for each in scheduler.executions if each.struck}
        reached = all(strike.point.execution in struck for strike in self._case.strikes)
        return Result(self._case, found, scheduler.executions, reached)

    def _publish(self, upto: int) -> None:
        """Send the next messages, up to a place."""
        portion = self._bodies[len(self._ids) : upto]
        if portion:
            self._ids += self._subject.send(portion)

    def _traffic(self) -> None:
        if self._case.traffic:
            self._publish(len(self._ids) + 1)

    def _first(self, run: Run) -> None:
        """The first run, and what recovers from its death."""
        scheduler = self._scheduler
        for place, task in enumerate(scheduler.tasks):
            execution = self._attempt(run, task)
            if execution.ended is Ended.DONE and _is_through(run, task):
                continue
            if execution.ended is Ended.HUNG:
                self._mistakes.append(f"{execution.name} hung")
            self._recover(run, place)
            return

    def _wake_all(self) -> None:
        for each in self._scheduler.asleep:
            self._wake(each)
        if not self._scheduler.wait_for_drivers():
            self._mistakes.append("a driver hung")

    def _wake(self, execution: Execution) -> None:
        """Let one that is asleep go on; others have taken its work, and it must see that."""
        calls, outcomes = self._begun(), self._outcomes()
        self._scheduler.wake(execution)
        if execution.ended is Ended.HUNG:
            self._mistakes.append(f"{execution.name} hung when it woke")
        if self._subject.unstaged:  # it has its batches in memory, and nowhere to look
            return
        if self._case.recovery is Recovery.LAPSE and not self._subject.lapses:
            return  # what it holds is still its own
        names = {each.name for each in (execution, execution.driver) if each is not None}
        handled = [call for call in self._begun()[len(calls) :] if call.execution in names]
        # Whoever has looked may sleep before it acts: that is one batch for each of its threads.
        batchers = self._subject.pipeline.batchers.values()
        if len(handled) > sum(batcher.concurrency for batcher in batchers):
            self._mistakes.append(f"{execution.name} woke, and began {len(handled)} batches")
        struck = [each.point for each in self._case.strikes if each.point.execution in names]
        in_batch = any(point.call.kind == "handle_batch" for point in struck)
        if in_batch and self._outcomes() - outcomes:
            self._mistakes.append(f"{execution.name} woke, and recorded what it had not looked at")

    def _begun(self) -> list[Witnessed]:
        """The calls of ``handle_batch`` so far."""
        calls = witnessed(self._subject.witness)
        return [each for each in calls if each.stage == "handle_batch" and each.succeeded is None]

    def _outcomes(self) -> set[Path]:
        return set(self._subject.work.glob("staging/*/*/one/outcomes/**/*.json"))

    def _recover(self, run: Run, place: int) -> None:
        tasks = self._scheduler.tasks
        recovery = self._case.recovery
        if recovery is Recovery.RETRY:
            self._go_on(run, tasks[place:])
        elif recovery is Recovery.GIVE_UP and tasks[place] != "ack":
            self._go_on(run, tasks[place + 1 :], failed=[tasks[place]])
        elif recovery is Recovery.CLEAR:
            if self._subject.hold_failed and tasks[place] != "ack":
                # Somebody clears it while the sensor holds what it received.
                self._scheduler.attempt(run, "ack", failed=[tasks[place]])
            self._go_on(run, tasks)
        elif recovery is Recovery.SIDE_BY_SIDE:
            run.over = True
            self._side_by_side("two", "three")
        else:
            if recovery is Recovery.LAPSE:
                self._pass_time(self._subject.lease * 1.1 + 60.0)
            else:
                run.over = True
            two = self._scheduler.run("two")
            self._go_on(two, tasks)
            two.over = True

    def _go_on(self, run: Run, tasks: Sequence[str], failed: Sequence[str] = ()) -> None:
        """Execute tasks, each until it is done; a task without a try left fails the run.

        One whose batches can get no outcome any more fails as well, and the others go on.
        """
        for _ in self._steps(run, tasks, failed):
            pass

    def _side_by_side(self, *run_ids: str) -> None:
        """Execute the tasks of two runs, one of each in turn.

        Who falls asleep is not taken for dead: it goes on when the other run has come to its end.
        """
        one, other = (
            self._steps(self._scheduler.run(each), self._scheduler.tasks, beside=True)
            for each in run_ids
        )
        while (asleep := next(one, None)) is not None:
            if asleep:
                for _ in other:
                    pass
            one, other = other, one
        for _ in other:
            pass

    def _steps(
        self, run: Run, tasks: Sequence[str], failed: Sequence[str] = (), *, beside: bool = False
    ) -> Iterator[bool]:
        """Execute tasks as :meth:`_go_on` does, and yield after each.

        :param beside: Whether another run is at work: it also yields ``True`` while one is asleep.
        """
        for task in tasks:
            for _ in range(_TRIES):
                execution = self._attempt(run, task, failed=failed)
                if beside and execution.ended is Ended.ASLEEP:
                    yield True
                    self._scheduler.resume(execution, run, task)
                if execution.ended is Ended.DONE and _is_through(run, task):
                    break
            else:
                if execution.ended is not Ended.DONE:
                    told = f"{execution.name} {execution.ended.value}, after all tries"
                    self._mistakes.append(told)
                    break
                failed = [*failed, task]
            yield False
        run.over = run.over or beside

    def _attempt(self, run: Run, task: str, *, failed: Sequence[str] = ()) -> Execution:
        """Execute a task; the sensor as often as it wants to look again."""
        scheduler = self._scheduler
        execution = scheduler.attempt(run, task, failed=failed)
        self._traffic()
        while task == "ack" and execution.ended is Ended.DONE and run.returned[task] is None:
            self._pass_time(self._subject.hold_failed / 3)
            execution = scheduler.attempt(run, task, failed=failed)
        return execution

    def _drain(self) -> None:
        """Run until the queue is empty."""
        for number in range(_RUNS):
            if not self._subject.waiting():
                return
            if number:
                # What waits now is delayed, or held by a lease that nobody gives back.
                self._pass_time(self._subject.lease * 1.1 + 60.0)
            run = self._scheduler.run(f"drain-{number + 1}")
            self._go_on(run, self._scheduler.tasks)
            self._wake_all()  # one that sleeps may hold messages that no queue shows
            run.over = True
        waiting = self._subject.waiting()
        if waiting:
            self._mistakes.append(f"{waiting} messages do not drain within {_RUNS} runs")

    def _forget(self) -> None:
        """More runs, after so long that nothing of the others may be left."""
        if any(_OPEN.search(path) for path in self._subject.staged()):
            self._one_more("after")  # accounts for those that died
        for looks in reversed(range(self._subject.looks)):
            self._pass_time(_RETENTION)
            self._one_more(f"look-{looks}" if looks else "last")

    def _one_more(self, run_id: str) -> None:
        run = self._scheduler.run(run_id)
        self._go_on(run, self._scheduler.tasks)
        self._wake_all()
        run.over = True

    def _pass_time(self, seconds: float) -> None:
        self._scheduler.ahead += seconds
        self._subject.pass_time(seconds)


def _is_through(run: Run, task: str) -> bool:
    """Whether a task left no batch without an outcome, which would count as failed; and whether the
    sensor need not look again.
    """
    returned = run.returned.get(task)
    outcomes = returned.get("outcomes") if isinstance(returned, dict) else None
    looks = task == "ack" and returned is None
    return not (looks or (outcomes and outcomes["without_outcome"]))
