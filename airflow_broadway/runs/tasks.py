"""What the tasks of a run do, each from its first step to its last.

An operator only says which run, pipeline and task it is, and makes of what comes back what its host
wants of a task.  The sensor's part is :mod:`airflow_broadway.runs.watch`, and a run without staging
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
    """What a process task did.

    :param reference: What later tasks get of it; no payload.
    :param timed_out: Whether an interrupt of the host ended it while callbacks were at work; what
        was done by then is published.
    :param trouble: Why people should look at what was settled here; empty if nothing is wrong.
    """

    reference: dict[str, Any]
    timed_out: bool
    trouble: str


class ProcessTask:
    """Clears up after others, receives within a budget, handles each message, stages the results.

    :param pipeline: As it is loaded: with its own producer.
    :param index: Which of the pipeline's producers it is, from 0; ``None``: the only one.
    :param source: Where the messages come from; the live queue unless given.
    :raises RequestRefused: If nothing serves the source.
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
        """Do it.

        :raises BroadwayError: If the broker or staging fails; everything received was given back.
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
        """Take no more, and end soon.  Called from a signal handler."""
        self._process.stop("signal")


def send_depth(
    pipeline: Pipeline, ports: Ports, metrics: Metrics, run: StagedRun
) -> QueueDepth | None:
    """Report the depth of the queue, as metrics and to the pages, and return it; ``None`` where the
    broker has none.
    """
    env = producer_env(pipeline, ports, store=run.store)
    at = env.clock.now()
    try:
        depth: QueueDepth | None = pipeline.producer.depth(env)
    except Exception as error:
        # Only a gauge: what was received has been published.
        log.warning("Could not ask how full the queue is: %s", error)
        return None
    if depth is not None:
        metrics.depth(depth, tells_age=pipeline.producer.tells_age)
    if pipeline.run.source.asks_broker:
        queues = WatchedQueues.of(pipeline)
        by = f"run {run.run_id}"
        report_backlog(run.store, run.dag_id, queues, depth, at=at, by=by)
    return depth


class BatchTask:
    """Groups what process tasks staged for one batcher into batches, and runs those of Python."""

    def __init__(
        self, run: StagedRun, pipeline: Pipeline, task: Task, ports: Ports, *, batcher: str
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._task = task
        self._ports = ports
        self._batcher = batcher
        self._batches: PythonBatches | None = None
        self._apart: ChildProcess | None = None
        self._stopped = False
        #: The pipeline with the producer that delivered what is planned.
        self._served = pipeline

    def plan(self, processed: Iterable[Mapping[str, Any]], *, label: str) -> BatchPlan | None:
        """The plan of batches, new or as an earlier try made it; ``None`` if nothing was staged.

        A plan has no message if the run no longer holds those that were staged.

        :param processed: The references of the process tasks.
        :param label: Names the try; unique for ever.
        :raises StagingError: If a process task staged under another root, staged messages cannot be
            read, or the plan not be written.
        """
        references = list(processed)
        self._run.store.check_roots(references)
        generations = [
            each["generation"] for each in references if each["batchers"].get(self._batcher)
        ]
        if not generations:
            return None
        self._served = with_source(self._pipeline, source_of(self._run, generations))
        return plan_batches(self._run, self._served, self._batcher, generations, try_label=label)

    def handle(self, plan: BatchPlan) -> dict[str, int] | None:
        """Run ``handle_batch`` on each batch without an outcome; ``None`` if Spark is to do so.

        :returns: Counts of batches, of messages by result, and of batches without an outcome: the
            run no longer holds their messages, or was stopped.
        :raises BroadwayError: If a process of its own could not handle them, and did not die.
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
        # A fork that cannot ask the host would wait for ever.
        forks, forked = self._task.forks, False
        while not self._stopped and isolation.choose() and forks and isolation.careful:
            forked = True
            raised = self._handle_apart(plan, isolation)
            if not isolation.goes_on():
                if raised and not isolation.has_deaths:
                    raise BroadwayError(raised)
                break
        self._batches = self._python_batches(plan)
        if self._stopped:  # before there was anything to stop
            self._batches.stop()
        with self._stand_in(plan):
            if forked or (forks and isolation.careful):
                return self._batches.count()
            return self._batches.run()

    def _handle_apart(self, plan: BatchPlan, isolation: Isolation) -> str:
        """Run batches in a process of its own, which may die of one; what it raised."""
        batches = self._python_batches(plan, isolation.step, isolation.parent)

        def work() -> None:
            # There, and not here: two processes cannot talk to the host by one connection.
            with self._stand_in(plan):
                batches.run()

        # While no other thread of ours is at work.
        self._apart = apart = ChildProcess(work, batches.stop)
        if self._stopped:  # in between
            apart.stop()
        try:
            ending = apart.wait()
        finally:
            self._apart = None
        if ending:
            log.warning("The process that ran batches of %r: %s.", plan.batcher, ending)
        return apart.raised

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
        """What later tasks get of a plan; no payload."""
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
        """Begin no further batch, and end soon.  Called from a signal handler."""
        self._stopped = True
        if self._apart is not None:
            self._apart.stop()
        if self._batches is not None:
            self._batches.stop()
