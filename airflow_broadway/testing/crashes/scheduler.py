"""A scheduler in small: it runs the tasks of runs, each in a process of its own, as Airflow does.

An execution is a fork, so it begins within a millisecond, and nothing of it outlives it.
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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.testing.crashes.interceptor import Interceptor
from airflow_broadway.testing.crashes.points import Call, Point, Strike, Traits, What
from airflow_broadway.testing.crashes.spark import (
    Driver,
    be_driver,
    uses_spark,
    wait_for_drivers,
)
from airflow_broadway.testing.crashes.subject import FOLDER, Subject
from airflow_broadway.testing.crashes.tasks import Attempt

#: Seconds that one execution may take.
PATIENCE = 120.0
#: Seconds that a process sleeps at least: what it knew from before is old when it wakes.
_SLEPT = 60.0


class Ended(StrEnum):
    """How an execution came to its end."""

    DONE = "done"
    FAILED = "failed"
    DIED = "died"
    ASLEEP = "asleep"
    HUNG = "hung"


@dataclass
class Execution:
    """One execution of a task."""

    name: str
    pid: int
    ended: Ended = Ended.DONE
    #: The calls by which it touched the world.
    seen: list[Point] = field(default_factory=list)
    #: Whether the strike that was meant for it happened.
    struck: bool = False
    #: Of a task that submits to Spark: the driver it started.
    driver: Execution | None = None


@dataclass
class Run:
    """One run of the Dag."""

    run_id: str
    #: Whether the scheduler says that it has ended.
    over: bool = False
    tries: Counter[str] = field(default_factory=Counter)
    #: What the tasks returned.
    returned: dict[str, Any] = field(default_factory=dict)


class Scheduler:
    """Runs tasks, and knows which runs are over.

    :param strikes: What happens in executions, by their names.
    """

    def __init__(self, subject: Subject, strikes: Iterable[Strike] = ()) -> None:
        self._subject = subject
        self._strikes = {strike.point.execution: strike for strike in strikes}
        self._runs: dict[str, Run] = {}
        #: All executions so far, in order.
        self.executions: list[Execution] = []
        #: Seconds by which the clock of tasks is ahead of the machine's.
        self.ahead = 0.0
        self._results = subject.folder / "results"
        self._results.mkdir()
        self._log = subject.folder / "log.txt"
        self._drivers = subject.folder / "drivers"

    @property
    def tasks(self) -> list[str]:
        """The task ids of a run, in order.

        The sensor begins with the run: ``look`` is one of its looks while others are at work, and
        ``ack`` its last.
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
        """The executions that are asleep, in the order in which they began."""
        return [each for each in self.executions if each.ended is Ended.ASLEEP]

    def close(self) -> None:
        """End what is still asleep: nothing of a case outlives it, whatever was raised."""
        for each in self.asleep:
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
            each.ended = Ended.DIED
        wait_for_drivers(self._drivers, 0.0)

    def run(self, run_id: str) -> Run:
        """The run of that id; new if there is none."""
        return self._runs.setdefault(run_id, Run(run_id))

    def attempt(self, run: Run, task: str, *, failed: Sequence[str] = ()) -> Execution:
        """Execute a task once, as its next try.

        :param failed: The tasks of the run that have failed for good.
        """
        run.tries[task] += 1
        name = f"{run.run_id}/{task}/{run.tries[task]}"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._be(name, run, task, failed)
        execution = Execution(name, pid)
        self.executions.append(execution)
        if task == "spark":
            execution.driver = Execution(_driver_of(name), pid)
        self._await(execution)
        if execution.driver is not None:
            # Who was struck comes first, and then what may come of it.
            place = len(self.executions) - execution.struck
            self.executions.insert(place, execution.driver)
        self._note_returned(execution, run, task)
        return execution

    def _note_returned(self, execution: Execution, run: Run, task: str) -> None:
        if execution.ended is Ended.DONE:
            run.returned[task] = json.loads(self._place(execution.name).read_text())["returned"]

    def wake(self, execution: Execution) -> None:
        """Let one that is asleep go on to its end; it finds that time has passed."""
        self.ahead += _SLEPT
        self._subject.pass_time(_SLEPT)
        for each in (execution, execution.driver):
            if each is not None:
                place = self._place(each.name, "ahead")
                place.with_suffix(".tmp").write_text(str(self.ahead))
                place.with_suffix(".tmp").rename(place)
        os.kill(execution.pid, signal.SIGCONT)
        self._await(execution)

    def resume(self, execution: Execution, run: Run, task: str) -> None:
        """Let one that is asleep, and that nobody has taken for dead, go on to its end."""
        self.wake(execution)
        self._note_returned(execution, run, task)

    def wait_for_drivers(self) -> bool:
        """Wait for drivers of Spark that have outlived their tasks; whether they came to an end."""
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
                execution.ended = Ended.HUNG
                return
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        if os.WIFSTOPPED(status):
            execution.ended = Ended.ASLEEP
        elif os.WIFSIGNALED(status):
            execution.ended = Ended.DIED
        else:
            execution.ended = Ended.FAILED if os.WEXITSTATUS(status) else Ended.DONE
        self._read(execution)
        if execution.driver is not None:
            self._read(execution.driver)

    def _read(self, execution: Execution) -> None:
        """Read what an execution has told so far."""
        place = self._place(execution.name)
        if place.exists():
            told = json.loads(place.read_text())
            execution.struck = told["struck"]
            _warm(told["modules"])
            execution.seen = [
                Point(execution.name, Call(*call), nth, Traits(*traits))
                for call, nth, traits in told["seen"]
            ]

    def _restarts_at(self, execution: Execution) -> bool:
        strike = self._strikes.get(execution.name)
        return strike is not None and strike.what is What.BROKER_RESTARTS

    def _place(self, name: str, suffix: str = "json") -> Path:
        """Where an execution tells what it saw and returned; ``"ahead"``: and is told the time."""
        return self._results / f"{name.replace('/', '-')}.{suffix}"

    # -- in the process of an execution ----------------------------------------------------------

    def _be(self, name: str, run: Run, task: str, failed: Sequence[str]) -> None:
        """Execute a task, and end this process."""
        status = 1
        try:
            driver, arguments, ahead = None, None, self.ahead
            if task == "spark":
                driver = Driver(self._drivers)
                if driver.pid == 0:
                    arguments, ahead = driver.arguments()
                    name, task = _driver_of(name), "driver"
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.write(2, f"-- {name}\n".encode())
            interceptor = Interceptor(name, self._strikes, ahead=ahead)
            tell = _Teller(self._place(name), interceptor)
            interceptor.on_strike = tell.tell
            clock = _MovedClock(interceptor)
            interceptor.pass_time = clock.pass_time
            interceptor.on_wake = lambda: clock.wake(self._ahead(interceptor.execution))
            number_ids(name, salt=self._subject.salt)
            os.chdir(self._subject.work)
            os.environ[FOLDER] = str(self._subject.work)
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
                    over={each.run_id: each.over for each in self._runs.values()},
                    interceptor=interceptor,
                    driver=driver,
                )
                returned = self._subject.execute(attempt)
            interceptor.call("return", "", lambda: tell.tell(returned))
            tell.tell(returned)
            status = 0 if arguments is None else returned
        except BaseException:  # nothing may return into the scheduler
            traceback.print_exc()
            tell.tell()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _drive(self, arguments: list[str]) -> int:
        """Be the driver of a Spark application, whose pipeline has its options in its class."""
        overrides = self._subject.overrides()
        made = self._subject.pipeline(**overrides)
        for name in overrides:
            setattr(self._subject.pipeline, name, getattr(made, name))
        return be_driver(arguments)

    def _ahead(self, name: str) -> float:
        """What the scheduler's clock says; waits until the scheduler has told, for another thread
        than this one may have been stopped first.
        """
        place = str(self._place(name, "ahead"))
        while not os.path.exists(place):
            time.sleep(0.001)
        handle = os.open(place, os.O_RDONLY)
        try:
            return float(os.read(handle, 100))
        finally:
            os.close(handle)


class _Teller:
    """Tells the scheduler what an execution saw and returned."""

    def __init__(self, place: Path, interceptor: Interceptor) -> None:
        self._place = str(place)
        self._interceptor = interceptor
        self._known = set(sys.modules)

    def tell(self, returned: Any = None) -> None:
        told = {
            "returned": returned,
            "struck": self._interceptor.struck,
            "modules": [name for name in sys.modules if name not in self._known],
            "seen": [(each.call, each.nth, each.traits) for each in self._interceptor.seen],
        }
        handle = os.open(self._place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(handle, json.dumps(told).encode())
        os.close(handle)


class _MovedClock:
    """Makes every clock of this process go by the interceptor's; nobody waits for one."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._slept = 0.0
        replaced: Any = SystemClock
        replaced.now = lambda clock: self._now()
        replaced.monotonic = staticmethod(self._monotonic)
        replaced.sleep = lambda clock, seconds: self.pass_time(seconds)

    def _now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self._interceptor.ahead)

    def _monotonic(self) -> float:
        return time.monotonic() + self._slept

    def pass_time(self, seconds: float) -> None:
        self._interceptor.ahead += seconds
        self._slept += seconds

    def wake(self, ahead: float) -> None:
        """Go by what the scheduler's clock says by now."""
        self.pass_time(ahead - self._interceptor.ahead)


def number_ids(execution: str, salt: str) -> None:
    """Make the ids of this execution the same ones, in the same order, whenever it runs.

    :param salt: What tells them from those of other cases at the same broker.
    """
    made = count()
    last = hashlib.md5(salt.encode()).hexdigest()[:12]

    def uuid4() -> uuid.UUID:
        first = hashlib.md5(f"{execution}/{next(made)}".encode()).hexdigest()[:20]
        return uuid.UUID(first + last, version=4)

    def token_hex(nbytes: int | None = None) -> str:
        digits = hashlib.sha512(f"{execution}/{next(made)}/{salt}".encode()).hexdigest()
        return digits[: 2 * (nbytes or secrets.DEFAULT_ENTROPY)]

    uuid.uuid4 = uuid4
    secrets.token_hex = token_hex


def _driver_of(name: str) -> str:
    """The name of the driver that an execution of ``spark`` starts."""
    return name.replace("/spark/", "/driver/")


def _warm(modules: Iterable[str]) -> None:
    """Import what an execution had to import: the next one is forked from a process that has."""
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
