"""Any order of sending, receiving, stopping, settling and lapsing, on the embedded queue.

Between any two calls that a run makes of its producer, anything may happen; the clock is moved by
hand.  What happens is drawn by hypothesis, and the same for the same draw: no other process is at
work, and no time passes by itself.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.local.run import LocalRun
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.ports import Ports, producer_env
from airflow_broadway.runs.process import Process
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing import ManualClock
from tests.living.brokers_sqlite import LivingSqlite
from tests.living.ledger import Account, account, compare
from tests.living.pipelines import PIPELINES
from tests.living.publisher import body_of
from tests.living.sink import handled

LEASE = 60.0

#: What happens between two calls, and how often: mostly messages come.
STEPS = st.sampled_from(
    [
        *["nothing"] * 3,
        *["send"] * 6,
        "tick",
        "stop",
        "other",
        "release",
        "settle",
        "lapse",
        "crash",
    ]
)
#: Those after which no report can be the whole truth.
UNTOLD = {"release", "settle", "lapse", "crash"}

RUNS = st.tuples(
    st.sampled_from(["local", "staged"]),
    st.sampled_from(
        [{"max_messages": 7}, {"max_messages": 100}, {"max_bytes": 300}, {"max_seconds": 2.0}, {}]
    ),
)


class Crash(BaseException):
    """The run dies of this."""


class Watched:
    """One half of a producer: something may happen before and after each call."""

    def __init__(self, half: Any, between: Callable[[], None]) -> None:
        self._half = half
        self._between = between

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._half, name)
        if not callable(attribute) or name == "close":
            return attribute

        def call(*given: Any, **named: Any) -> Any:
            self._between()
            result = attribute(*given, **named)
            self._between()
            return result

        return call


class Run:
    """A run at work, which can be stopped, and settled by another."""

    def __init__(self, world: World, flow: str, budget: dict[str, Any]) -> None:
        self._flow = flow
        self._budget = budget
        self._clock = world.clock
        name = uuid.uuid4().hex
        producer = {**world.broker.options, "lease": LEASE}
        context = {"sink": str(world.sink), "run": name}
        self._pipeline = PIPELINES["sqlite"](producer=producer, context=context)
        self._staged = StagedRun(
            world.store, pipeline=self._pipeline.name, dag_id="dag", run_id=name, clock=self._clock
        )
        owner = {"dag_id": "dag", "run_id": name, "task_id": "process", "map_index": -1}
        self._env = producer_env(
            self._pipeline,
            Ports(),
            generation=name,
            owner={**owner, "try_number": 1},
            store=world.store,
            clock=self._clock,
        )
        self._process = Process(
            self._staged, self._pipeline, env=self._env, budget=Budget(**budget)
        )
        self._stopped = ""

    def stop(self) -> None:
        """Takes no more."""
        self._stopped = "stopped"
        self._process.stop("stopped")

    def __call__(self) -> dict[str, Any]:
        """Does it all; returns its report."""
        if self._flow == "local":
            stop = Stop(self._env.clock, self._pipeline.shutdown, lambda: self._stopped)
            report = LocalRun(self._pipeline, self._env, stop=stop).pull(Budget(**self._budget))
            settled = report.settled.to_json()
            return {**settled, "settle_failed": settled["failed"], "balanced": report.balanced}
        reference = self._process.run()
        if reference["batchers"]:
            plan = plan_batches(
                self._staged, self._pipeline, "default", [self._env.generation], try_label="1"
            )
            PythonBatches(self._staged, self._pipeline, plan).run()
        return self.settle()

    def settle(self) -> dict[str, Any]:
        """Settles it with what outcomes there are; returns the sensor's report."""
        settler = RunWatcher(self._staged, self._pipeline)
        try:
            settler.settle(final=True)
            report = settler.report(failed_tasks=[])
        finally:
            settler.close()
        return {**report["totals"], "balanced": report["balanced"]}


class World:
    """A queue, runs on it, and a schedule of what else happens."""

    def __init__(self, folder: Path, schedule: Sequence[str]) -> None:
        self.clock = ManualClock()
        self.broker = LivingSqlite(folder)
        self.sink = folder / "sink.jsonl"
        self.store = Store.open(f"file://{folder}/staging")
        self._queue = SqliteQueue(folder / "queue.db", "living", clock=self.clock)
        self._schedule = iter(schedule)
        self._happened: set[str] = set()
        self._published = 0
        #: The innermost last.
        self._at_work: list[Run] = []
        self._reports: list[dict[str, Any]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Lets things happen between the calls."""
        with ExitStack() as stack:
            for name in ("source", "custodian"):
                stack.enter_context(mock.patch.object(SqliteProducer, name, self._opens(name)))
            yield

    def _opens(self, name: str) -> Callable[[Any, Any], Watched]:
        opening = getattr(SqliteProducer, name)
        return lambda producer, env: Watched(opening(producer, env), self.between)

    def between(self) -> None:
        """Lets the next thing happen."""
        step = next(self._schedule, "nothing")
        self._happened.add(step)
        getattr(self, step)()

    def run(self, flow: str, budget: dict[str, Any]) -> None:
        """A run from its beginning to any end."""
        run = Run(self, flow, budget)
        self._at_work.append(run)
        try:
            self._reports.append(run())
        except (BroadwayError, Crash):
            if not self._happened & UNTOLD:
                raise
        finally:
            self._at_work.pop()

    def end(self) -> Account:
        """Drains the queue, and counts."""
        self._queue.close()
        confirmed = dict.fromkeys(range(self._published), 0.0)
        summary = account(confirmed, self._published, handled(self.sink), self.broker.drain())
        assert all(report["balanced"] for report in self._reports), self._reports
        if not self._happened & UNTOLD:
            compare(summary, self._reports)
        return summary

    # -- what happens --------------------------------------------------------------------------

    def nothing(self) -> None:
        pass

    def send(self) -> None:
        numbers = range(self._published, self._published + 4)
        self._queue.send([body_of(number) for number in numbers])
        self._published = numbers.stop

    def tick(self) -> None:
        self.clock.advance(0.5)

    def stop(self) -> None:
        if self._at_work:
            self._at_work[-1].stop()

    def other(self) -> None:
        """A whole run meanwhile."""
        if len(self._at_work) < 3:
            self.run("local", {"max_messages": 5})

    def lapse(self) -> None:
        self.clock.advance(LEASE + 1.0)

    def release(self) -> None:
        """A sweep mistakes living runs for dead."""
        for lease in self._queue.leases():
            self._queue.release(lease.lease.generation)

    def settle(self) -> None:
        """Another process settles a run early; the run continues afterwards."""
        if self._at_work and len(self._at_work) < 3:
            with suppress(BroadwayError):
                self._at_work[-1].settle()

    def crash(self) -> None:
        raise Crash


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(runs=st.lists(RUNS, min_size=1, max_size=4), schedule=st.lists(STEPS, max_size=60))
def test_any_interleaving_of_calls_loses_nothing(runs, schedule):
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), schedule)
        world.send()
        with world.watched():
            for flow, budget in runs:
                world.run(flow, budget)

        summary = world.end()

    assert summary.good, str(summary)
