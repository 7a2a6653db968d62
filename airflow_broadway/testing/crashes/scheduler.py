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
from airflow_broadway.core.formats.ownership import Ownership
from airflow_broadway.testing.crashes.interceptor import Interceptor
from airflow_broadway.testing.crashes.points import Call, Fault, Injection, Point, Traits
from airflow_broadway.testing.crashes.spark import Driver, run_driver, uses_spark, wait_for_drivers
from airflow_broadway.testing.crashes.subject import Subject, enter_case_folder
from airflow_broadway.testing.crashes.tasks import Attempt

#: The maximum seconds of one execution.
TIMEOUT = 120.0
#: Simulated seconds of a suspension, after which cached state is outdated.
_SUSPENSION = 60.0


class EndState(StrEnum):
    """The state in which an execution ended."""

    DONE = "done"
    FAILED = "failed"
    DIED = "died"
    SUSPENDED = "suspended"
    HUNG = "hung"


@dataclass
class Run:
    """A run of the DAG."""

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
    end_state: EndState = EndState.DONE
    #: Its external calls.
    points: list[Point] = field(default_factory=list)
    #: Whether its fault was injected.
    injected: bool = False
    #: The Spark driver that it started, if any.
    driver: Execution | None = None


class Scheduler:
    """Executes tasks, and tracks which runs have ended.

    :param injections: The faults to inject.
    """

    def __init__(self, subject: Subject, injections: Iterable[Injection] = ()) -> None:
        self._subject = subject
        self._injections = {injection.point.execution: injection for injection in injections}
        self._runs: dict[str, Run] = {}
        #: All executions so far, in order.
        self.executions: list[Execution] = []
        #: Seconds by which the clock of tasks is ahead of the system clock.
        self.clock_offset = 0.0
        self._results = subject.folder / "results"
        self._results.mkdir()
        self._drivers = subject.folder / "drivers"

    @property
    def tasks(self) -> list[str]:
        """The task ids of a run, in order.

        The sensor starts with the run: ``poke`` is a poke while other tasks run, ``ack`` its last.
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
        return [*processes, "poke", *batches, *spark, "ack"]

    @property
    def suspended(self) -> list[Execution]:
        """The suspended executions, in order of start."""
        return [
            execution for execution in self.executions if execution.end_state is EndState.SUSPENDED
        ]

    def close(self) -> None:
        """Kills suspended executions, so that no process outlives the case."""
        for execution in self.suspended:
            os.kill(execution.pid, signal.SIGKILL)
            os.waitpid(execution.pid, 0)
            execution.end_state = EndState.DIED
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
        self._wait_for(execution)
        if execution.driver is not None:
            # The execution with the fault comes first.
            place = len(self.executions) - execution.injected
            self.executions.insert(place, execution.driver)
        return execution

    def resume(self, execution: Execution) -> None:
        """Resumes a suspended execution until it ends, after advancing the clocks."""
        self.clock_offset += _SUSPENSION
        self._subject.pass_time(_SUSPENSION)
        for process in (execution, execution.driver):
            if process is not None:
                path = self._path(process.name, "ahead")
                path.with_suffix(".tmp").write_text(str(self.clock_offset))
                path.with_suffix(".tmp").rename(path)
        os.kill(execution.pid, signal.SIGCONT)
        self._wait_for(execution)

    def wait_for_drivers(self) -> bool:
        """Waits for Spark drivers that outlive their tasks; returns whether all have ended."""
        return wait_for_drivers(self._drivers, TIMEOUT)

    def _wait_for(self, execution: Execution) -> None:
        deadline = time.monotonic() + TIMEOUT
        delay = 0.0005
        while True:
            pid, status = os.waitpid(execution.pid, os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status) and self._restarts_at(execution):
                self._subject.restart()
                os.kill(execution.pid, signal.SIGCONT)
            elif pid:
                break
            if time.monotonic() > deadline:
                os.kill(execution.pid, signal.SIGKILL)
                os.waitpid(execution.pid, 0)
                execution.end_state = EndState.HUNG
                return
            time.sleep(delay)
            delay = min(delay * 1.5, 0.01)
        if os.WIFSTOPPED(status):
            execution.end_state = EndState.SUSPENDED
        elif os.WIFSIGNALED(status):
            execution.end_state = EndState.DIED
        else:
            execution.end_state = EndState.FAILED if os.WEXITSTATUS(status) else EndState.DONE
        returned = self._read(execution)
        if execution.end_state is EndState.DONE:
            execution.run.returned[execution.task] = returned
        if execution.driver is not None:
            self._read(execution.driver)

    def _read(self, execution: Execution) -> Any:
        """Reads the report of an execution; returns the result in it."""
        path = self._path(execution.name)
        if not path.exists():
            return None
        report = json.loads(path.read_text())
        execution.injected = report["injected"]
        _import_modules(report["modules"])
        execution.points = [
            Point(execution.name, Call(*call), nth, Traits(*traits))
            for call, nth, traits in report["points"]
        ]
        return report["returned"]

    def _restarts_at(self, execution: Execution) -> bool:
        injection = self._injections.get(execution.name)
        return injection is not None and injection.fault is Fault.BROKER_RESTARTS

    def _path(self, name: str, suffix: str = "json") -> Path:
        """Returns the path of an execution's report, or of its clock offset (``"ahead"``)."""
        return self._results / f"{name.replace('/', '-')}.{suffix}"

    # -- in the process of an execution ----------------------------------------------------------

    def _run_child(self, name: str, run: Run, task: str, failed: Sequence[str]) -> None:
        """Executes a task, and exits this process."""
        status = 1
        try:
            driver, arguments, clock_offset = None, None, self.clock_offset
            if task == "spark":
                driver = Driver(self._drivers)
                if driver.pid == 0:
                    arguments, clock_offset = driver.arguments()
                    name, task = _driver_of(name), "driver"
            enter_case_folder(self._subject.work, self._subject.folder / "log.txt", name)
            interceptor = Interceptor(name, self._injections, clock_offset=clock_offset)
            report = _make_reporter(str(self._path(name)), interceptor)
            interceptor.on_injection = report
            interceptor.on_resume = lambda: interceptor.pass_time(
                self._clock_offset(name) - interceptor.clock_offset
            )
            _replace_clock(interceptor)
            use_deterministic_ids(name, salt=self._subject.salt)
            for boundary in self._subject.boundaries():
                boundary.install(interceptor)
            if arguments is not None:
                returned: Any = self._run_driver(arguments)
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

    def _run_driver(self, arguments: list[str]) -> int:
        """Runs the Spark driver, with the pipeline's overrides set on its class."""
        overrides = self._subject.overrides()
        pipeline = self._subject.pipeline(**overrides)
        for name in overrides:
            setattr(self._subject.pipeline, name, getattr(pipeline, name))
        return run_driver(arguments)

    def _clock_offset(self, name: str) -> float:
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
            "injected": interceptor.injected,
            "modules": [name for name in sys.modules if name not in known],
            "points": [(point.call, point.nth, point.traits) for point in interceptor.points],
        }
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(handle, json.dumps(content).encode())
        os.close(handle)

    return report


def _replace_clock(interceptor: Interceptor) -> None:
    """Replaces every clock of this process by the interceptor's; waits are skipped."""
    clock: Any = SystemClock
    clock.now = lambda clock: datetime.now(UTC) + timedelta(seconds=interceptor.clock_offset)
    clock.monotonic = staticmethod(lambda: time.monotonic() + interceptor.skipped)
    clock.sleep = lambda clock, seconds: interceptor.pass_time(seconds)
    # A slow machine makes no more checks than a fast one; after a suspension all are repeated.
    defaults: Any = Ownership.__init__.__kwdefaults__
    defaults["fresh_for"] = _SUSPENSION


def use_deterministic_ids(execution: str, salt: str) -> None:
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


def _import_modules(modules: Iterable[str]) -> None:
    """Imports the modules of an execution, so that later forks already have them."""
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
