"""One case: inject faults into a run, recover, drain the queue, account for every message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from airflow_broadway.testing.crashes.account import Account, Violation, check_messages
from airflow_broadway.testing.crashes.callbacks import RecordedCall, recorded_calls
from airflow_broadway.testing.crashes.points import Injection
from airflow_broadway.testing.crashes.scheduler import EndState, Execution, Run, Scheduler
from airflow_broadway.testing.crashes.subject import Subject

#: The maximum number of runs to drain the queue.
_RUNS = 12
#: The maximum tries of a task.
_TRIES = 4
#: Seconds after which retention removes all files of a run.
_RETENTION = 8 * 24 * 3600.0
#: The marker file of an unaccounted run.
_OPEN = re.compile(r"/_open/[^.][^/]*\.json$")


#: The text form of a case.
_CASE = re.compile(r"(?P<injections>.+?)(?: \[(?P<recovery>[a-z ]+)(?P<traffic>, traffic)?\])?")


class Recovery(StrEnum):
    """How Airflow, or an operator, continues after the death of a task."""

    #: The task's next try, and the rest of the run.
    RETRY = "retry"
    #: The task has no try left; the rest of the run continues without it.
    GIVE_UP = "give up"
    #: The whole run is cleared, and all its tasks are retried.
    CLEAR = "clear"
    #: The run has failed and is abandoned; the next run starts.
    NEXT_RUN = "next run"
    #: The run counts as running, but its leases expire; the next run starts.
    LAPSE = "lapse"
    #: The run has failed; the next two runs execute concurrently.
    SIDE_BY_SIDE = "side by side"


class Case(NamedTuple):
    """The faults injected into one pipeline, and the recovery.

    :param injections: The faults in the first run, and in the recovery from it.
    :param traffic: Whether messages are sent while runs start and end.
    """

    injections: tuple[Injection, ...] = ()
    recovery: Recovery = Recovery.RETRY
    traffic: bool = False

    def __str__(self) -> str:
        injected = ", then ".join(map(str, self.injections)) or "no fault"
        return f"{injected} [{self.recovery.value}{', traffic' if self.traffic else ''}]"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parses the text of :meth:`__str__`; without brackets the recovery is a retry.

        :raises ValueError: If the text is invalid.
        """
        match = _CASE.fullmatch(text.strip())
        if match is None or (match["recovery"] or "retry") not in set(Recovery):
            ways = ", ".join(Recovery)
            raise ValueError(f"expected POINT: FAULT [one of {ways}], got: {text!r}")
        injections = tuple(map(Injection.parse, match["injections"].split(", then ")))
        return cls(injections, Recovery(match["recovery"] or "retry"), bool(match["traffic"]))


@dataclass
class Result:
    """The result of a case."""

    case: Case
    account: Account
    executions: list[Execution]
    #: The folder of its files.
    folder: Path

    @property
    def passed(self) -> bool:
        return self.account.passed


def run_case(
    subject: Subject, bodies: Sequence[bytes], case: Case, expected: Account | None
) -> Result:
    """Runs one case on a new subject.

    :param bodies: The messages.
    :param expected: The account without faults; ``None`` if unknown.
    """
    with closing(Scheduler(subject, case.injections)) as scheduler:
        return _Case(subject, bodies, case, scheduler).run(expected)


class _Case:
    def __init__(
        self, subject: Subject, bodies: Sequence[bytes], case: Case, scheduler: Scheduler
    ) -> None:
        self._subject = subject
        self._case = case
        self._scheduler = scheduler
        self._bodies = list(bodies)
        self._ids: list[str] = []
        self._mistakes: list[str] = []

    def run(self, expected: Account | None) -> Result:
        scheduler = self._scheduler
        self._subject.prepare()
        self._publish(len(self._bodies) // 2 if self._case.traffic else len(self._bodies))
        run = scheduler.run("one")
        self._run_first(run)
        self._resume_all()
        run.over = True
        self._publish(len(self._bodies))
        self._drain()
        self._age_out()
        failing = {s.point.execution for s in self._case.injections if s.fails_callbacks}
        account = check_messages(self._subject, self._ids, expected, failing)
        injected = {execution.name for execution in scheduler.executions if execution.injected}
        if any(injection.point.execution not in injected for injection in self._case.injections):
            self._mistakes.append(
                "the point was not reached: the calls of this pipeline differ from run to run"
            )
        for text in self._mistakes:
            account.add(Violation.OTHER, text)
        return Result(self._case, account, scheduler.executions, self._subject.folder)

    def _publish(self, upto: int) -> None:
        """Sends messages until ``upto`` have been sent."""
        portion = self._bodies[len(self._ids) : upto]
        if portion:
            self._ids += self._subject.send(portion)

    def _run_first(self, run: Run) -> None:
        """Executes the first run, and the recovery from its death."""
        scheduler = self._scheduler
        for place, task in enumerate(scheduler.tasks):
            execution = self._attempt(run, task)
            if execution.end_state is EndState.DONE and _is_complete(run, task):
                continue
            if execution.end_state is EndState.HUNG:
                self._mistakes.append(f"{execution.name} hung")
            self._recover(run, place)
            return

    def _resume_all(self) -> None:
        for execution in self._scheduler.suspended:
            self._resume(execution)
        if not self._scheduler.wait_for_drivers():
            self._mistakes.append("a driver hung")

    def _resume(self, execution: Execution) -> None:
        """Resumes a suspended execution, which must notice that others have taken over its work."""
        calls, outcomes = self._batch_calls(), self._outcomes()
        self._scheduler.resume(execution)
        if execution.end_state is EndState.HUNG:
            self._mistakes.append(f"{execution.name} hung after it was resumed")
        if self._subject.unstaged:  # its batches are in memory only
            return
        if self._case.recovery is Recovery.LAPSE and not self._subject.lapses:
            return  # its leases are still valid
        names = {one.name for one in (execution, execution.driver) if one is not None}
        handled = [call for call in self._batch_calls()[len(calls) :] if call.execution in names]
        # A thread may be suspended between check and action: one batch per thread is allowed.
        batchers = self._subject.pipeline.batchers.values()
        if len(handled) > sum(batcher.concurrency for batcher in batchers):
            self._mistakes.append(f"{execution.name} resumed and started {len(handled)} batches")
        points = [s.point for s in self._case.injections if s.point.execution in names]
        in_batch = any(point.call.kind == "handle_batch" for point in points)
        if in_batch and self._outcomes() - outcomes:
            self._mistakes.append(f"{execution.name} resumed and recorded outcomes unchecked")

    def _batch_calls(self) -> list[RecordedCall]:
        """Returns the calls of ``handle_batch`` so far."""
        calls = recorded_calls(self._subject.calls_file)
        return [call for call in calls if call.stage == "handle_batch" and call.succeeded is None]

    def _outcomes(self) -> set[Path]:
        return set(self._subject.work.glob("staging/*/*/one/outcomes/**/*.json"))

    def _recover(self, run: Run, place: int) -> None:
        tasks = self._scheduler.tasks
        recovery = self._case.recovery
        if recovery is Recovery.RETRY:
            self._execute(run, tasks[place:])
        elif recovery is Recovery.GIVE_UP and tasks[place] != "ack":
            self._execute(run, tasks[place + 1 :], failed=[tasks[place]])
        elif recovery is Recovery.CLEAR:
            if self._subject.hold_failed and tasks[place] != "ack":
                # Cleared while the sensor holds its messages.
                self._scheduler.attempt(run, "ack", failed=[tasks[place]])
            self._execute(run, tasks)
        elif recovery is Recovery.SIDE_BY_SIDE:
            run.over = True
            self._side_by_side("two", "three")
        else:
            if recovery is Recovery.LAPSE and not self._subject.exclusive:
                self._pass_time(self._subject.lease * 1.1 + 60.0)
            else:
                run.over = True
            self._run_whole("two")

    def _execute(self, run: Run, tasks: Sequence[str], failed: Sequence[str] = ()) -> None:
        """Executes tasks, each until it succeeds; a task without a try left fails the run.

        A task whose batches can never get an outcome fails too, and the others continue.
        """
        for _ in self._steps(run, tasks, failed):
            pass

    def _side_by_side(self, *run_ids: str) -> None:
        """Executes the tasks of two runs alternately.

        A suspended execution does not count as dead: it resumes when the other run has ended.
        """
        one, other = (
            self._steps(self._scheduler.run(run_id), self._scheduler.tasks, concurrent=True)
            for run_id in run_ids
        )
        while (suspended := next(one, None)) is not None:
            if suspended:
                for _ in other:
                    pass
            one, other = other, one
        for _ in other:
            pass

    def _steps(
        self,
        run: Run,
        tasks: Sequence[str],
        failed: Sequence[str] = (),
        *,
        concurrent: bool = False,
    ) -> Iterator[bool]:
        """Executes tasks as :meth:`_execute` does, and yields after each.

        :param concurrent: Whether another run is active; then yields ``True`` for a suspended task.
        """
        for task in tasks:
            for _ in range(_TRIES):
                execution = self._attempt(run, task, failed=failed)
                if concurrent and execution.end_state is EndState.SUSPENDED:
                    yield True
                    self._scheduler.resume(execution)
                if execution.end_state is EndState.DONE and _is_complete(run, task):
                    break
            else:
                if execution.end_state is not EndState.DONE:
                    if concurrent and self._subject.exclusive:
                        break
                    text = f"{execution.name} {execution.end_state.value}, after all tries"
                    self._mistakes.append(text)
                    break
                failed = [*failed, task]
            yield False
        run.over = run.over or concurrent

    def _attempt(self, run: Run, task: str, *, failed: Sequence[str] = ()) -> Execution:
        """Executes a task; the sensor repeatedly until it is done."""
        scheduler = self._scheduler
        execution = scheduler.attempt(run, task, failed=failed)
        if self._case.traffic:
            self._publish(len(self._ids) + 1)
        while task == "ack" and execution.end_state is EndState.DONE and run.returned[task] is None:
            self._pass_time(self._subject.hold_failed / 3)
            execution = scheduler.attempt(run, task, failed=failed)
        return execution

    def _drain(self) -> None:
        """Executes runs until the queue is empty."""
        for number in range(_RUNS):
            if not self._subject.waiting():
                return
            if number:
                # The remaining messages are delayed, or under an abandoned lease.
                self._pass_time(self._subject.lease * 1.1 + 60.0)
            self._run_whole(f"drain-{number + 1}")
        waiting = self._subject.waiting()
        if waiting:
            self._mistakes.append(f"{waiting} messages do not drain within {_RUNS} runs")

    def _age_out(self) -> None:
        """Executes more runs, after the retention of the previous ones."""
        if any(_OPEN.search(path) for path in self._subject.staged()):
            self._run_whole("after")  # accounts for those that died
        for number in reversed(range(self._subject.aging_runs)):
            self._pass_time(_RETENTION)
            self._run_whole(f"aging-{number}" if number else "last")

    def _run_whole(self, run_id: str) -> None:
        """Executes another run from its first task to its last."""
        run = self._scheduler.run(run_id)
        self._execute(run, self._scheduler.tasks)
        self._resume_all()  # a suspended one may hold prefetched messages
        run.over = True

    def _pass_time(self, seconds: float) -> None:
        self._scheduler.clock_offset += seconds
        self._subject.pass_time(seconds)


def _is_complete(run: Run, task: str) -> bool:
    """Returns whether every batch of a task has an outcome, and whether the sensor is done."""
    returned = run.returned.get(task)
    outcomes = returned.get("outcomes") if isinstance(returned, dict) else None
    looks = task == "ack" and returned is None
    return not (looks or (outcomes and outcomes["without_outcome"]))
