"""Hypothesis interleaves sends, receives, stops, settlements and lease expiries.

A drawn step runs before and after each call that a run makes to its producer.  The clock is manual
and there is one process, so that a test case is deterministic.
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
from tests.traffic.accounting import Account, check_reports, count_messages
from tests.traffic.brokers_sqlite import SqliteTraffic
from tests.traffic.pipelines import PIPELINES
from tests.traffic.publisher import body_of
from tests.traffic.sink import read_handled

LEASE = 60.0

#: The steps between two calls, weighted.
STEPS = st.sampled_from(
    [
        *["nothing"] * 3,
        *["send"] * 6,
        "tick",
        "stop",
        "other",
        "release",
        "settle",
        "expire_leases",
        "crash",
    ]
)
#: Steps after which a run's report may be incomplete.
INEXACT_STEPS = {"release", "settle", "expire_leases", "crash"}

RUNS = st.tuples(
    st.sampled_from(["local", "staged"]),
    st.sampled_from(
        [{"max_messages": 7}, {"max_messages": 100}, {"max_bytes": 300}, {"max_seconds": 2.0}, {}]
    ),
)


class SimulatedCrash(BaseException):
    """Simulates the death of the run's process."""


class SteppedCalls:
    """A source or custodian that runs a step before and after each call."""

    def __init__(self, half: Any, run_next_step: Callable[[], None]) -> None:
        self._half = half
        self._run_next_step = run_next_step

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._half, name)
        if not callable(attribute) or name == "close":
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            self._run_next_step()
            result = attribute(*args, **kwargs)
            self._run_next_step()
            return result

        return call


class SimulatedRun:
    """A run that steps can stop, or settle as another process would."""

    def __init__(self, simulation: Simulation, flow: str, budget: dict[str, Any]) -> None:
        self._flow = flow
        self._budget = budget
        self._clock = simulation.clock
        name = uuid.uuid4().hex
        producer = {**simulation.broker.options, "lease": LEASE}
        context = {"sink": str(simulation.sink), "run": name}
        self._pipeline = PIPELINES["sqlite"](producer=producer, context=context)
        self._staged = StagedRun(
            simulation.store,
            pipeline=self._pipeline.name,
            dag_id="dag",
            run_id=name,
            clock=self._clock,
        )
        owner = {"dag_id": "dag", "run_id": name, "task_id": "process", "map_index": -1}
        self._env = producer_env(
            self._pipeline,
            Ports(),
            generation=name,
            owner={**owner, "try_number": 1},
            store=simulation.store,
            clock=self._clock,
        )
        self._process = Process(
            self._staged, self._pipeline, env=self._env, budget=Budget(**budget)
        )
        self._stopped = ""

    def stop(self) -> None:
        """Stops receiving."""
        self._stopped = "stopped"
        self._process.stop("stopped")

    def __call__(self) -> dict[str, Any]:
        """Executes the run; returns its report."""
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
        """Settles the run by the recorded outcomes; returns the sensor's report."""
        settler = RunWatcher(self._staged, self._pipeline)
        try:
            settler.settle(final=True)
            report = settler.report(failed_tasks=[])
        finally:
            settler.close()
        return {**report["totals"], "balanced": report["balanced"]}


class Simulation:
    """A queue, its runs, and the schedule of steps."""

    def __init__(self, folder: Path, schedule: Sequence[str]) -> None:
        self.clock = ManualClock()
        self.broker = SqliteTraffic(folder)
        self.sink = folder / "sink.jsonl"
        self.store = Store.open(f"file://{folder}/staging")
        self._queue = SqliteQueue(folder / "queue.db", "traffic", clock=self.clock)
        self._schedule = iter(schedule)
        self._steps: set[str] = set()
        self._published = 0
        #: Nested runs, the innermost last.
        self._active_runs: list[SimulatedRun] = []
        self._reports: list[dict[str, Any]] = []

    @contextmanager
    def step_calls(self) -> Iterator[None]:
        """Runs steps around the producer's calls."""
        with ExitStack() as stack:
            for name in ("source", "custodian"):
                stack.enter_context(
                    mock.patch.object(SqliteProducer, name, self._open_stepped(name))
                )
            yield

    def _open_stepped(self, name: str) -> Callable[[Any, Any], SteppedCalls]:
        open_half = getattr(SqliteProducer, name)
        return lambda producer, env: SteppedCalls(open_half(producer, env), self.run_next_step)

    def run_next_step(self) -> None:
        """Runs the next step of the schedule."""
        step = next(self._schedule, "nothing")
        self._steps.add(step)
        getattr(self, step)()

    def run(self, flow: str, budget: dict[str, Any]) -> None:
        """Executes a run; errors are allowed after the steps in :data:`INEXACT_STEPS`."""
        run = SimulatedRun(self, flow, budget)
        self._active_runs.append(run)
        try:
            self._reports.append(run())
        except (BroadwayError, SimulatedCrash):
            if not self._steps & INEXACT_STEPS:
                raise
        finally:
            self._active_runs.pop()

    def end(self) -> Account:
        """Drains the queue and counts the messages."""
        self._queue.close()
        confirmed = dict.fromkeys(range(self._published), 0.0)
        summary = count_messages(
            confirmed, self._published, read_handled(self.sink), self.broker.drain()
        )
        assert all(report["balanced"] for report in self._reports), self._reports
        if not self._steps & INEXACT_STEPS:
            check_reports(summary, self._reports)
        return summary

    # -- steps ---------------------------------------------------------------------------------

    def nothing(self) -> None:
        pass

    def send(self) -> None:
        numbers = range(self._published, self._published + 4)
        self._queue.send([body_of(number) for number in numbers])
        self._published = numbers.stop

    def tick(self) -> None:
        self.clock.advance(0.5)

    def stop(self) -> None:
        if self._active_runs:
            self._active_runs[-1].stop()

    def other(self) -> None:
        """Executes another run."""
        if len(self._active_runs) < 3:
            self.run("local", {"max_messages": 5})

    def expire_leases(self) -> None:
        self.clock.advance(LEASE + 1.0)

    def release(self) -> None:
        """Releases the leases of active runs, like a wrong sweep."""
        for lease in self._queue.leases():
            self._queue.release(lease.lease.generation)

    def settle(self) -> None:
        """Settles the active run early; the run continues afterwards."""
        if self._active_runs and len(self._active_runs) < 3:
            with suppress(BroadwayError):
                self._active_runs[-1].settle()

    def crash(self) -> None:
        raise SimulatedCrash


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(runs=st.lists(RUNS, min_size=1, max_size=4), schedule=st.lists(STEPS, max_size=60))
def test_any_interleaving_of_calls_loses_nothing(runs, schedule):
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(Path(folder), schedule)
        simulation.send()
        with simulation.step_calls():
            for flow, budget in runs:
                simulation.run(flow, budget)

        summary = simulation.end()

    assert summary.passed, str(summary)
