"""The tasks of a run as plain steps, without Airflow's machinery: to stop, repeat and kill them.

Queue and staging are real.  :func:`dies` runs a step in a forked child that kills itself with
SIGKILL at a named point: before or after a call of some function.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
from airflow.providers.common.compat.sdk import AirflowTaskTimeout

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, RetryPolicy
from airflow_broadway.adapters.host import MAX_SHUTDOWN
from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.ports import Ports, Task, producer_env
from airflow_broadway.runs.process import Process
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.sweep import sweep
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store

#: The host of an Airflow task, as far as these steps need it.
AS_AIRFLOW = Ports(interrupts=(AirflowTaskTimeout,), max_shutdown=MAX_SHUTDOWN)


#: Numbers of which 7 fails in the processor, 5 and 10 in the batch.
TEN = range(1, 11)


class Call(NamedTuple):
    """One message of one call of ``handle_batch``."""

    message_id: str
    number: int
    attempt: int
    redelivered: bool
    batch_id: str


class Sums(Broadway):
    """Numbers: those divisible by 7 fail in the processor, by 5 in the batch; both are dead."""

    producer: Any = SqliteProducer(
        queue="sums", path="/replaced", retry=RetryPolicy(max_attempts=1)
    )
    processors = Processors(concurrency=1, max_demand=10)
    batchers = {"default": Batcher(engine="python", batch_size=10, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = int(message.data)
        message = message.put_data(number)
        if number == context.get("now"):
            return message.ack_immediately()
        return message.failed("seven") if number % 7 == 0 else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        note(
            context["calls"],
            [
                Call(
                    message.message_id,
                    message.data,
                    message.attempt,
                    message.redelivered,
                    batch_info.batch_id,
                )
                for message in messages
            ],
        )
        now = context.get("now_in_batch")
        return [
            message.ack_immediately()
            if message.data == now
            else message.failed("five")
            if message.data % 5 == 0
            else message
            for message in messages
        ]


class PlainSums(Sums):
    """Without batchers."""

    name = "Sums"
    batchers = {}


def note(path: str, calls: Sequence[Call]) -> None:
    """Record a call of ``handle_batch`` on disk."""
    with closing(sqlite3.connect(path, timeout=60.0)) as db, db:
        db.execute("PRAGMA synchronous=FULL")
        db.execute("CREATE TABLE IF NOT EXISTS calls (id, number, attempt, redelivered, batch)")
        db.executemany("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", calls)


class Run:
    """One run of a Dag on a queue below ``folder``, and on a staging root there or elsewhere.

    :param clock: The clock of its batches.
    :param finished: Ids of runs that are over.
    :param airflow: The name of its Airflow deployment.
    :param create: Whether to create the embedded queue.
    :param numbers: The messages to send first.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str = "manual__1",
        *,
        pipeline: type[Broadway] = Sums,
        finished: Sequence[str] = (),
        context: Mapping[str, Any] | None = None,
        store: Store | None = None,
        clock: Clock | None = None,
        ports: Ports | None = None,
        airflow: str = "",
        create: bool = True,
        numbers: Iterable[int] = (),
        **options: Any,
    ) -> None:
        self.folder = folder
        self.clock = clock
        self.run_id = run_id
        self.ports = replace(ports or AS_AIRFLOW, is_over=lambda run_id: run_id in finished)
        self.calls_path = str(folder / "calls.db")
        self.pipeline = pipeline(
            producer={"path": str(folder / "queue.db")},
            context={"calls": self.calls_path, **(context or {})},
            **options,
        )
        store = store or Store.open(f"file://{folder}/staging")
        self.staged = StagedRun(
            store, pipeline="Sums", dag_id="sums", run_id=run_id, airflow=airflow
        )
        if create:
            with self.queue() as queue:
                queue.create()
        if numbers:
            self.send(numbers)

    def queue(self) -> SqliteQueue:
        """The queue, opened anew."""
        return SqliteQueue(self.folder / "queue.db", "sums")

    def send(self, numbers: Iterable[int]) -> None:
        """Send a message for each number."""
        with self.queue() as queue:
            queue.send([b"%d" % number for number in numbers])

    # -- steps ---------------------------------------------------------------------------------

    def process(
        self, index: int = 0, *, try_number: int = 1, isolates: bool = True, **budget: Any
    ) -> dict[str, Any]:
        """A process task: the sweep, then all that it does; returns its reference.

        :param isolates: Whether suspects are handled in a child process.
        """
        self.sweep(index)
        env = self.env(uuid.uuid4().hex, self.task(index, try_number).owner())
        process = Process(
            self.staged,
            self.pipeline,
            env=env,
            budget=Budget(**budget),
            ports=self.ports,
            isolates=isolates,
        )
        return process.run()

    def env(self, generation: str, owner: Mapping[str, Any]) -> ProducerEnv:
        return producer_env(
            self.pipeline, self.ports, generation=generation, owner=owner, store=self.staged.store
        )

    def sweep(self, index: int = 0) -> None:
        """Does the first step of a process task."""
        sweep(self.staged, self.pipeline, self.task(index), self.ports)

    def task(self, index: int = 0, try_number: int = 1) -> Task:
        return Task(
            dag_id="sums",
            run_id=self.run_id,
            task_id="process",
            map_index=index,
            try_number=try_number,
        )

    def batch(self, *references: Mapping[str, Any], try_number: int = 1) -> dict[str, int] | None:
        """A batcher task; ``None`` if it would skip itself."""
        received = [reference for reference in references if reference["batchers"]]
        if not received:
            return None
        plan = self.plan(*received, try_number=try_number)
        staged = copy(self.staged)
        staged.clock = self.clock or staged.clock
        python_batches = PythonBatches(
            staged,
            self.pipeline,
            plan,
            name="batch.default",
            try_number=try_number,
            ports=self.ports,
        )
        return python_batches.run()

    def plan(self, *references: Mapping[str, Any], try_number: int = 1) -> BatchPlan:
        generations = [reference["generation"] for reference in references]
        label = str(try_number)
        return plan_batches(self.staged, self.pipeline, "default", generations, try_label=label)

    def all(self) -> dict[str, Any]:
        """Every task once; returns the report."""
        self.batch(self.process())
        return self.ack()

    def next(self) -> Run:
        """The run after this one, which is over."""
        return Run(self.folder, "manual__2", finished=[self.run_id])

    def ack(self, *, final: bool = True) -> dict[str, Any]:
        """The last look of the ack sensor; returns the report."""
        watcher = self.watcher()
        try:
            watcher.heartbeat.beat()
            watcher.settle(final=final, over=final)
            return watcher.report(failed_tasks=[])
        finally:
            watcher.close()

    def watcher(self) -> RunWatcher:
        return RunWatcher(self.staged, self.pipeline, ports=self.ports)

    # -- evidence ------------------------------------------------------------------------------

    def calls(self) -> list[Call]:
        """The calls of ``handle_batch``, in order."""
        if not Path(self.calls_path).exists():
            return []
        with closing(sqlite3.connect(self.calls_path)) as db:
            rows = db.execute("SELECT * FROM calls ORDER BY rowid")
            return [Call(*row)._replace(redelivered=bool(row[3])) for row in rows]

    def dead(self) -> list[int]:
        """The numbers of the dead letters, sorted."""
        with self.queue() as queue:
            return sorted(int(letter.body) for letter in queue.dead_letters(limit=None))

    def depth(self) -> tuple[int, int, int, int]:
        """Ready, delayed, leased, dead."""
        with self.queue() as queue:
            depth = queue.depth()
        return depth.ready, depth.delayed, depth.leased, depth.dead

    def unmarked(self) -> list[Call]:
        """Inputs that came again neither marked nor under a batch id they had before."""
        seen: dict[str, set[str]] = {}
        results = []
        for call in self.calls():
            before = seen.setdefault(call.message_id, set())
            if before and not call.redelivered and call.batch_id not in before:
                results.append(call)
            before.add(call.batch_id)
        return results


def balanced(report: Mapping[str, Any]) -> dict[str, int]:
    """The totals of a report that balances."""
    totals: dict[str, int] = report["totals"]
    assert report["balanced"], totals
    return totals


class Point(NamedTuple):
    """A moment of a step: before or after the ``nth`` call of a function.

    :param function: ``"package.module:Class.method"``.
    :param when: A condition on the call's arguments.
    """

    function: str
    moment: str = "after"
    nth: int = 1
    when: Callable[..., bool] = lambda *_, **__: True

    def __str__(self) -> str:
        return f"{self.moment} {self.function.rpartition(':')[2]} {self.nth}"


def dies(step: Callable[[], object], point: Point) -> None:
    """Run ``step`` in a child that is killed at ``point``; fails if it is not."""
    child = os.fork()
    if not child:
        code = 1
        try:
            with deadly(point):
                step()
        except BaseException:
            traceback.print_exc()
            code = 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"not killed {point}: {os.waitstatus_to_exitcode(status)}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def _send(by: int) -> None:
    """Sends a signal to this process, and waits: another thread may be the one that receives it."""
    os.kill(os.getpid(), by)
    time.sleep(0.2)


def deadly(point: Point, by: int = signal.SIGKILL) -> Any:
    """Patches a function so that this process sends itself a signal at a point."""
    owner_path, _, name = point.function.rpartition(".")
    owner = resolve_name(owner_path)
    function = getattr(owner, name)
    count = 0

    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        counts = point.when(*args, **kwargs)
        count += counts
        at_point = counts and count == point.nth
        if at_point and point.moment == "before":
            _send(by)
        result = function(*args, **kwargs)
        if at_point and point.moment == "after":
            _send(by)
        return result

    return mock.patch.object(owner, name, struck)


def precede(
    monkeypatch: pytest.MonkeyPatch,
    step: Callable[..., object],
    owner: type | ModuleType,
    name: str,
    *,
    once: bool = False,
) -> None:
    """Have ``step`` called before calls of a method, with their arguments.

    :param once: Before the first call alone.
    """
    method = getattr(owner, name)
    begun = False

    def both(*args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        if not (once and begun):
            begun = True
            step(*args, **kwargs)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, both)
