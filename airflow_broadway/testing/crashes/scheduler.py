"""A small scheduler that executes the tasks of runs in separate processes, as Airflow does.

An execution is a fork, so it starts within a millisecond and leaves no state behind.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import secrets
import signal
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ctypes import c_bool
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import count
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.testing.crashes.interceptor import Interceptor
from airflow_broadway.testing.crashes.points import Call, Fault, Point, Strike, Traits
from airflow_broadway.testing.crashes.spark import Driver, be_driver, uses_spark, wait_for_drivers
from airflow_broadway.testing.crashes.subject import Subject, enter
from airflow_broadway.testing.crashes.tasks import Attempt

#: The maximum seconds of one execution.
PATIENCE = 120.0
#: Seconds by which a process is suspended: its earlier knowledge is then outdated.
_SLEPT = 60.0


class EndState(StrEnum):
    """How an execution ended."""

    DONE = "done"
    FAILED = "failed"
    DIED = "died"
    ASLEEP = "asleep"
    HUNG = "hung"


@dataclass
class Run:
    """One run of the Dag."""

    run_id: str
    #: In shared memory: a suspended task that resumes reads the present value.
    _over: Any = field(default_factory=lambda: RawValue(c_bool))
    tries: Counter[str] = field(default_factory=Counter)
    #: Task → result.
    returned: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return bool(self._over.value)

    @over.setter
    def over(self, over: bool) -> None:
        self._over.value = over

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_over": SimpleNamespace(value=self.over)}


@dataclass
class Execution:
    """One execution of a task."""

    name: str
    pid: int
    run: Run
    task: str
    ended: EndState = EndState.DONE
    #: Its external calls.
    seen: list[Point] = field(default_factory=list)
    #: Whether its fault was injected.
    struck: bool = False
    #: The Spark driver that it started, if any.
    driver: Execution | None = None


class Scheduler:
    """Executes tasks, and tracks which runs have ended.

    :param strikes: The faults to inject.
    """

    def __init__(self, subject: Subject, strikes: Iterable[Strike] = ()) -> None:
        self._subject = subject
        self._strikes = {strike.point.execution: strike for strike in strikes}
        self._runs: dict[str, Run] = {}
        #: All executions so far, in order.
        self.executions: list[Execution] = []
        #: Seconds by which the clock of tasks is ahead of the system clock.
        self.ahead = 0.0
        self._results = subject.folder / "results"
        self._results.mkdir()
        self._drivers = subject.folder / "drivers"

    @property
    def tasks(self) -> list[str]:
        """The task ids of a run, in order.

        The sensor starts with the run: ``look`` is a poke while other tasks run, ``ack`` its last.
        """
        pipeline = self._subject.pipeline
        if self._subject.unstaged:
            return ["run"]
        processes = [
            "process" if index == 0 else f"process!{index}"
            for index in range(pipeline.producer.concurrency)
        ]
        batches = [f"batch.{name}" for name in pipeline.batchers]
        spark = ["spark"] if uses_spark(pipeline) else []
        return [*processes, "look", *batches, *spark, "ack"]

    @property
    def asleep(self) -> list[Execution]:
        """The suspended executions, in order of start."""
        return [execution for execution in self.executions if execution.ended is EndState.ASLEEP]

    def close(self) -> None:
        """Kills suspended executions, so that no process outlives the case."""
        for execution in self.asleep:
            os.kill(execution.pid, signal.SIGKILL)
            os.waitpid(execution.pid, 0)
            execution.ended = EndState.DIED
        wait_for_drivers(self._drivers, 0.0)

    def run(self, run_id: str) -> Run:
        """Returns the run with this id; creates it if necessary."""
        return self._runs.setdefault(run_id, Run(run_id))

    def attempt(self, run: Run, task: str, *, failed: Sequence[str] = ()) -> Execution:
        """Executes a task once, as its next try.

        :param failed: The tasks of the run that have finally failed.
        """
        run.tries[task] += 1
        name = f"{run.run_id}/{task}/{run.tries[task]}"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._run_child(name, run, task, failed)
        execution = Execution(name, pid, run, task)
        self.executions.append(execution)
        if task == "spark":
            execution.driver = Execution(_driver_of(name), pid, run, "driver")
        self._await(execution)
        if execution.driver is not None:
            # The execution with the fault comes first.
            place = len(self.executions) - execution.struck
            self.executions.insert(place, execution.driver)
        return execution

    def wake(self, execution: Execution) -> None:
        """Resumes a suspended execution until it ends, after advancing the clocks."""
        self.ahead += _SLEPT
        self._subject.pass_time(_SLEPT)
        for process in (execution, execution.driver):
            if process is not None:
                path = self._path(process.name, "ahead")
                path.with_suffix(".tmp").write_text(str(self.ahead))
                path.with_suffix(".tmp").rename(path)
        os.kill(execution.pid, signal.SIGCONT)
        self._await(execution)

    def wait_for_drivers(self) -> bool:
        """Waits for Spark drivers that outlive their tasks; returns whether all have ended."""
        return wait_for_drivers(self._drivers, PATIENCE)

    def _await(self, execution: Execution) -> None:
        limit = time.monotonic() + PATIENCE
        pause = 0.0005
        while True:
            pid, status = os.waitpid(execution.pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status) and self._restarts_at(execution):
                self._subject.restart()
                os.kill(execution.pid, signal.SIGCONT)
            elif pid:
                break
            if time.monotonic() > limit:
                os.kill(execution.pid, signal.SIGKILL)
                os.waitpid(execution.pid, 0)
                execution.ended = EndState.HUNG
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        if os.WIFSTOPPED(status):
            execution.ended = EndState.ASLEEP
        elif os.WIFSIGNALED(status):
            execution.ended = EndState.DIED
        else:
            execution.ended = EndState.FAILED if os.WEXITSTATUS(status) else EndState.DONE
        returned = self._read(execution)
        if execution.ended is EndState.DONE:
            execution.run.returned[execution.task] = returned
        if execution.driver is not None:
            self._read(execution.driver)

    def _read(self, execution: Execution) -> Any:
        """Reads the report of an execution; returns the result in it."""
        path = self._path(execution.name)
        if not path.exists():
            return None
        report = json.loads(path.read_text())
        execution.struck = report["struck"]
        _warm(report["modules"])
        execution.seen = [
            Point(execution.name, Call(*call), nth, Traits(*traits))
            for call, nth, traits in report["seen"]
        ]
        return report["returned"]

    def _restarts_at(self, execution: Execution) -> bool:
        strike = self._strikes.get(execution.name)
        return strike is not None and strike.fault is Fault.BROKER_RESTARTS

    def _path(self, name: str, suffix: str = "json") -> Path:
        """Returns the path of an execution's report, or of its clock offset (``"ahead"``)."""
        return self._results / f"{name.replace('/', '-')}.{suffix}"

    # -- in the process of an execution ----------------------------------------------------------

    def _run_child(self, name: str, run: Run, task: str, failed: Sequence[str]) -> None:
        """Executes a task, and exits this process."""
        status = 1
        try:
            driver, arguments, ahead = None, None, self.ahead
            if task == "spark":
                driver = Driver(self._drivers)
                if driver.pid == 0:
                    arguments, ahead = driver.arguments()
                    name, task = _driver_of(name), "driver"
            enter(self._subject.work, self._subject.folder / "log.txt", name)
            interceptor = Interceptor(name, self._strikes, ahead=ahead)
            report = _make_reporter(str(self._path(name)), interceptor)
            interceptor.on_strike = report
            interceptor.on_wake = lambda: interceptor.pass_time(
                self._ahead(name) - interceptor.ahead
            )
            _move_clock(interceptor)
            number_ids(name, salt=self._subject.salt)
            for boundary in self._subject.boundaries():
                boundary.install(interceptor)
            if arguments is not None:
                returned: Any = self._drive(arguments)
            else:
                attempt = Attempt(
                    run_id=run.run_id,
                    task=task,
                    try_number=run.tries[task],
                    tasks=self.tasks,
                    failed=failed,
                    returned=run.returned,
                    runs=self._runs,
                    interceptor=interceptor,
                    driver=driver,
                )
                returned = self._subject.execute(attempt)
            interceptor.call("return", "", lambda: report(returned))
            report(returned)
            status = 0 if arguments is None else returned
        except BaseException:  # never return into the scheduler
            traceback.print_exc()
            report()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _drive(self, arguments: list[str]) -> int:
        """Runs the Spark driver, with the pipeline's overrides set on its class."""
        overrides = self._subject.overrides()
        pipeline = self._subject.pipeline(**overrides)
        for name in overrides:
            setattr(self._subject.pipeline, name, getattr(pipeline, name))
        return be_driver(arguments)

    def _ahead(self, name: str) -> float:
        """Returns the scheduler's clock offset; waits for its file, because another thread may
        have been stopped first.
        """
        path = str(self._path(name, "ahead"))
        while not os.path.exists(path):
            time.sleep(0.001)
        handle = os.open(path, os.O_RDONLY)
        try:
            return float(os.read(handle, 100))
        finally:
            os.close(handle)


def _make_reporter(path: str, interceptor: Interceptor) -> Callable[..., None]:
    """Returns a function that reports an execution's calls, and its result, to the scheduler."""
    known = set(sys.modules)

    def report(returned: Any = None) -> None:
        content = {
            "returned": returned,
            "struck": interceptor.struck,
            "modules": [name for name in sys.modules if name not in known],
            "seen": [(point.call, point.nth, point.traits) for point in interceptor.seen],
        }
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(handle, json.dumps(content).encode())
        os.close(handle)

    return report


def _move_clock(interceptor: Interceptor) -> None:
    """Replaces every clock of this process by the interceptor's; waits are skipped."""
    clock: Any = SystemClock
    clock.now = lambda clock: datetime.now(UTC) + timedelta(seconds=interceptor.ahead)
    clock.monotonic = staticmethod(lambda: time.monotonic() + interceptor.skipped)
    clock.sleep = lambda clock, seconds: interceptor.pass_time(seconds)


def number_ids(execution: str, salt: str) -> None:
    """Makes the random ids of this execution deterministic.

    :param salt: Makes them distinct from those of other cases at the same broker.
    """
    counter = count()
    last = hashlib.md5(salt.encode()).hexdigest()[:12]

    def uuid4() -> uuid.UUID:
        first = hashlib.md5(f"{execution}/{next(counter)}".encode()).hexdigest()[:20]
        return uuid.UUID(first + last, version=4)

    def token_hex(nbytes: int | None = None) -> str:
        digits = hashlib.sha512(f"{execution}/{next(counter)}/{salt}".encode()).hexdigest()
        return digits[: 2 * (nbytes or secrets.DEFAULT_ENTROPY)]

    uuid.uuid4 = uuid4
    secrets.token_hex = token_hex


def _driver_of(name: str) -> str:
    """Returns the name of the driver of a ``spark`` execution."""
    return name.replace("/spark/", "/driver/")


def _warm(modules: Iterable[str]) -> None:
    """Imports the modules of an execution, so that later forks already have them."""
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
