"""The process and batch tasks of a run, from the first step to the last.

An operator only passes run, pipeline and task, and converts the result for its host.  For the
sensor see :mod:`airflow_broadway.runs.watch`, for a run without staging
:mod:`airflow_broadway.runs.unstaged`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.custody.run_summary import empty_line
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.formats.deaths import TRIES
from airflow_broadway.core.formats.isolation import MOST_PROCESSES, Step
from airflow_broadway.core.formats.plan import BatchPlan
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.run_source import RUN, RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.reports import report_backlog
from airflow_broadway.runs.metrics import Metric, Metrics
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.runs.poison.child_process import ChildProcess
from airflow_broadway.runs.poison.isolation import Isolation
from airflow_broadway.runs.ports import Ports, Task, producer_env
from airflow_broadway.runs.process import Process
from airflow_broadway.runs.python_batches import PythonBatches
from airflow_broadway.runs.sources.dead_letters import move_letters
from airflow_broadway.runs.sources.past_run import PastRun
from airflow_broadway.runs.sources.pipelines import source_of, with_source
from airflow_broadway.runs.stand_in import StandIn
from airflow_broadway.runs.sweep import remove_old_runs, sweep
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.rate_state import StagedRateState
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)


class Processed(NamedTuple):
    """The result of a process task.

    :param reference: The reference for later tasks; no payload.
    :param timed_out: Whether an interrupt of the host ended it during callbacks; results until then
        are published.
    :param trouble: A problem of the settlement here that needs attention; empty if there is none.
    """

    reference: dict[str, Any]
    timed_out: bool
    trouble: str


class ProcessTask:
    """Sweeps dead executions, receives within a budget, handles messages and stages the results.

    :param pipeline: The pipeline as loaded, with its own producer.
    :param index: Index of the pipeline's producer, from 0; ``None`` if it is the only one.
    :param source: The source of the messages; default: the live queue.
    :raises RequestRefused: If no producer serves the source.
    """

    def __init__(
        self,
        run: StagedRun,
        pipeline: Pipeline,
        task: Task,
        ports: Ports,
        *,
        index: int | None = None,
        budget: Budget,
        source: RunSource | None = None,
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._task = task
        self._ports = ports
        self._source = source or RunSource()
        #: The pipeline with the producer that serves the source.
        self._served = with_source(pipeline, self._source)
        self._env = producer_env(
            self._served,
            ports,
            generation=uuid.uuid4().hex,
            owner=task.owner(),
            index=index,
            store=run.store,
            clock=run.clock,
        )
        self._process = self._make_process(budget)

    def _make_process(self, budget: Budget) -> Process | PastRun:
        if self._source.kind == RUN:
            return PastRun(self._run, self._served, self._env)
        return Process(
            self._run,
            self._served,
            env=self._env,
            budget=budget,
            rate_state=StagedRateState(self._run),
            ports=self._ports,
            isolates=self._task.forks,
        )

    def run(self) -> Processed:
        """Runs the task.

        :raises BroadwayError: If the broker or staging fails; all received messages were released.
        """
        sweep(self._run, self._pipeline, self._task, self._ports, self._source)
        remove_old_runs(self._run, self._pipeline)
        move_letters(self._served, self._env)
        with log_ids(generation=self._env.generation):
            reference = self._process.run()
        metrics = Metrics(
            self._ports.metrics, pipeline=self._pipeline.name, dag_id=self._run.dag_id
        )
        metrics.count(Metric.RECEIVED, reference["received"])
        metrics.count(Metric.FAILED, reference["failed"])
        metrics.count(Metric.DEAD_LETTERED, reference.get("set_aside", 0))
        depth = None
        if not self._process.timed_out:
            depth = send_depth(self._served, self._ports, metrics, self._run)
        if not reference["received"] and self._source.asks_broker:
            reference |= {
                "receives": self._process.receives,
                "depth": None if depth is None else depth._asdict(),
            }
            unusual = not self._process.receives or (depth is not None and depth.ready)
            log.log(logging.WARNING if unusual else logging.INFO, "%s", empty_line(reference))
        return Processed(reference, self._process.timed_out, self._process.trouble)

    def stop(self) -> None:
        """Stops receiving and ends soon.  Called from a signal handler."""
        self._process.stop("signal")


def send_depth(
    pipeline: Pipeline, ports: Ports, metrics: Metrics, run: StagedRun
) -> QueueDepth | None:
    """Reports the depth of the queue as metrics and to the pages, and returns it.

    Returns ``None`` if the broker reports no depth or cannot be reached.
    """
    env = producer_env(pipeline, ports, store=run.store)
    at = env.clock.now()
    try:
        depth: QueueDepth | None = pipeline.producer.depth(env)
    except Exception as error:
        # Only a gauge is lost: the received messages are published already.
        log.warning("Could not read the depth of the queue: %s", error)
        return None
    if depth is not None:
        metrics.depth(depth, tells_age=pipeline.producer.tells_age)
    if pipeline.run.source.asks_broker:
        queues = WatchedQueues.of(pipeline)
        by = f"run {run.run_id}"
        report_backlog(run.store, run.dag_id, queues, depth, at=at, by=by)
    return depth


class BatchTask:
    """Groups the messages staged for one batcher into batches, and runs those of Python."""

    def __init__(
        self, run: StagedRun, pipeline: Pipeline, task: Task, ports: Ports, *, batcher: str
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._task = task
        self._ports = ports
        self._batcher = batcher
        self._batches: PythonBatches | None = None
        self._child: ChildProcess | None = None
        self._stopped = False
        #: The pipeline with the producer that delivered the planned messages.
        self._served = pipeline

    def plan(self, processed: Iterable[Mapping[str, Any]], *, label: str) -> BatchPlan | None:
        """Returns the plan of batches, new or of an earlier try; ``None`` if nothing was staged.

        A plan is empty if the run no longer holds the staged messages.

        :param processed: The references of the process tasks.
        :param label: Globally unique name of the try.
        :raises StagingError: If a process task staged under another root, staged messages cannot be
            read, or the plan cannot be written.
        """
        references = list(processed)
        self._run.store.check_roots(references)
        generations = [
            row["generation"] for row in references if row["batchers"].get(self._batcher)
        ]
        if not generations:
            return None
        self._served = with_source(self._pipeline, source_of(self._run, generations))
        return plan_batches(self._run, self._served, self._batcher, generations, try_label=label)

    def handle(self, plan: BatchPlan) -> dict[str, int] | None:
        """Runs ``handle_batch`` on each batch without an outcome; ``None`` if the engine is Spark.

        :returns: Counts of batches, of messages by result, and of batches without an outcome, whose
            messages the run no longer holds or which were stopped.
        :raises BroadwayError: If the work of a child process raised.
        """
        if self._pipeline.batchers[self._batcher].engine != "python":
            return None
        plans = OpenPlans(self._run, [plan.path])
        name = self._task.file_name
        isolation = Isolation(
            self._run,
            self._pipeline,
            plans,
            name,
            folder=TRIES,
            most=MOST_PROCESSES,
            cleared=self._task.cleared,
        )
        # A fork that cannot call the host would wait forever.
        forks, forked = self._task.forks, False
        while not self._stopped and isolation.choose() and forks and isolation.careful:
            forked = True
            raised = self._handle_in_child(plan, isolation)
            if not isolation.goes_on():
                if raised and not isolation.has_deaths:
                    raise BroadwayError(raised)
                break
        self._batches = self._python_batches(plan)
        if self._stopped:  # stopped before the batches existed
            self._batches.stop()
        with self._stand_in(plan):
            if forked or (forks and isolation.careful):
                return self._batches.count()
            return self._batches.run()

    def _handle_in_child(self, plan: BatchPlan, isolation: Isolation) -> str:
        """Runs batches in a child process, which may crash; returns the exception of its work."""
        batches = self._python_batches(plan, isolation.step, isolation.parent)

        def work() -> None:
            # In the child: two processes cannot share one connection to the host.
            with self._stand_in(plan):
                batches.run()

        # At this point no other thread of this process is active.
        self._child = child = ChildProcess(work, batches.stop)
        if self._stopped:  # stopped meanwhile
            child.stop()
        try:
            ending = child.wait()
        finally:
            self._child = None
        if ending:
            log.warning("The child process with batches of %r ended: %s.", plan.batcher, ending)
        return child.raised

    def _python_batches(
        self, plan: BatchPlan, step: Step | None = None, parent: str = ""
    ) -> PythonBatches:
        return PythonBatches(
            self._run,
            self._served,
            plan,
            name=self._task.file_name,
            try_number=self._task.try_number,
            ports=self._ports,
            step=step,
            parent=parent,
        )

    @contextmanager
    def _stand_in(self, plan: BatchPlan) -> Iterator[None]:
        stand_in = StandIn(self._run, self._pipeline, plan.generations, ports=self._ports)
        stand_in.start()
        try:
            yield
        finally:
            stand_in.finish()

    def reference(self, plan: BatchPlan | None) -> dict[str, Any]:
        """Returns the reference of a plan for later tasks; no payload."""
        if plan is None or not plan.messages:
            return {"plan": None, "batcher": self._batcher, "messages": 0, "batches": 0}
        return {
            "plan": plan.path,
            "root_id": plan.root_id,
            "host": plan.host,
            "batcher": self._batcher,
            "messages": plan.messages,
            "batches": plan.batches,
            "triggers": plan.triggers,
        }

    def stop(self) -> None:
        """Starts no further batch and ends soon.  Called from a signal handler."""
        self._stopped = True
        if self._child is not None:
            self._child.stop()
        if self._batches is not None:
            self._batches.stop()
