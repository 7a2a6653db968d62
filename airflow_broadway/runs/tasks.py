"""The tasks of a run, from the first step to the last, except the sensor.

An operator only passes run, pipeline and task, and converts the result for its host.  For the
sensor see :mod:`airflow_broadway.runs.watch`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_broadway.core.collector import rare_collections
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.run_summary import empty_line, lines_of, summary_line
from airflow_broadway.core.errors import BroadwayError, RequestRefused, StagingError
from airflow_broadway.core.formats.deaths import TRIES
from airflow_broadway.core.formats.isolation import MOST_PROCESSES
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.formats.plan import BatchPlan, reference_without_plan
from airflow_broadway.core.local.run import LocalRun, RunReport
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.run_source import RUN, RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.runs.account import keep_report
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.reports import report_backlog
from airflow_broadway.runs.metrics import Metric, Metrics
from airflow_broadway.runs.plans import OpenPlans
from airflow_broadway.runs.poison.child_process import ChildProcess
from airflow_broadway.runs.poison.isolation import Isolation
from airflow_broadway.runs.poison.suspects import suspects_of
from airflow_broadway.runs.ports import Ports, Task, open_generation, producer_env
from airflow_broadway.runs.settle import settle
from airflow_broadway.runs.sinks import LocalCommits, time_sinks
from airflow_broadway.runs.sources.dead_letters import move_letters
from airflow_broadway.runs.sources.pipelines import Custodians, prepare_sink, source_of, with_source
from airflow_broadway.runs.sweep import remove_old_runs, sweep
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.rate_state import StagedRateState
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.settling.journal import Progress, record_settled
from airflow_broadway.staging.store import host_name

if TYPE_CHECKING:
    from airflow_broadway.runs.process import Process
    from airflow_broadway.runs.python_batches import PythonBatches
    from airflow_broadway.runs.sources.past_run import PastRun

log = logging.getLogger(__name__)


class Pulled(NamedTuple):
    """The result of a task that receives.

    :param reference: The reference for later tasks; no payload.
    :param trouble: A problem of the settlement here that needs attention; empty if there is none.
    :param timed_out: Whether an interrupt of the host ended it during callbacks; results until then
        are published.
    """

    reference: dict[str, Any]
    trouble: str
    timed_out: bool = False


@dataclass
class PullTask:
    """A task that receives messages from a source.

    :param pipeline: The pipeline as loaded, with its own producer.
    :param index: Index of the pipeline's producer, from 0; ``None`` if it is the only one.
    :param source: The source of the messages; default: the live queue.
    :raises RequestRefused: If no producer serves the source.
    """

    staged: StagedRun
    pipeline: Pipeline
    task: Task
    ports: Ports
    _: KW_ONLY
    budget: Budget
    index: int | None = None
    source: RunSource = field(default_factory=RunSource)

    def __post_init__(self) -> None:
        #: The pipeline with the producer that serves the source.
        self.served = with_source(self.pipeline, self.source)
        self.env = producer_env(
            self.served,
            self.ports,
            generation=uuid.uuid4().hex,
            owner=self.task.owner(),
            index=self.index,
            store=self.staged.store,
            clock=self.staged.clock,
        )
        self.metrics = Metrics(
            self.ports.metrics, pipeline=self.pipeline.name, dag_id=self.staged.dag_id
        )


class ProcessTask(PullTask):
    """Sweeps dead executions, receives within a budget, handles messages and stages the results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._process: Process | PastRun
        if self.source.kind == RUN:
            from airflow_broadway.runs.sources.past_run import PastRun  # loads pyarrow

            self._process = PastRun(self.staged, self.served, self.env, self.ports)
        else:
            from airflow_broadway.runs.process import Process

            self._process = Process(
                self.staged,
                self.served,
                env=self.env,
                budget=self.budget,
                rate_state=StagedRateState(self.staged),
                ports=self.ports,
                isolates=self.task.forks,
            )

    def run(self) -> Pulled:
        """Runs the task.

        :raises BroadwayError: If the broker or staging fails; all received messages were released.
        """
        if self.pipeline.dead_letter_table is not None:
            from airflow_broadway.runs.dead_letter_table import check_table  # loads pyarrow

            check_table(self.staged, self.pipeline, self.ports.connections)
        sweep(self.staged, self.pipeline, self.task, self.ports, self.source)
        remove_old_runs(self.staged, self.pipeline)
        move_letters(self.served, self.env)
        process = self._process
        with log_ids(generation=self.env.generation):
            reference = process.run()
        self.metrics.count(Metric.RECEIVED, reference["received"])
        self.metrics.count(Metric.FAILED, reference["failed"])
        self.metrics.count(Metric.DEAD_LETTERED, reference.get("set_aside", 0))
        depth = None
        if not process.timed_out:
            depth = send_depth(self.served, self.ports, self.metrics, self.staged)
        if not reference["received"] and self.source.asks_broker:
            reference |= {
                "receives": process.receives,
                "depth": None if depth is None else depth._asdict(),
            }
            unusual = not process.receives or (depth is not None and depth.ready)
            log.log(logging.WARNING if unusual else logging.INFO, "%s", empty_line(reference))
        return Pulled(reference, process.trouble, process.timed_out)

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
        metrics.depth(depth, reports_oldest_age=pipeline.producer.reports_oldest_age)
    if pipeline.run.source.asks_broker:
        queues = WatchedQueues.of(pipeline)
        report_backlog(run.store, run.dag_id, queues, depth, at=at, by=f"run {run.run_id}")
    return depth


@dataclass
class UnstagedTask(PullTask):
    """Receives, handles, batches and settles, all in this task; only results are staged.

    For pipelines whose batchers are all Python: messages are settled at their broker as soon as
    they have an outcome.

    :param fail_when: See :func:`airflow_broadway.core.custody.run_summary.failures_trouble`.
    """

    _: KW_ONLY
    fail_when: Any = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stop = Stop(self.staged.clock, min(self.pipeline.shutdown, self.ports.max_shutdown))

    def stop(self) -> None:
        """Stops receiving and ends soon.  Called from a signal handler."""
        self._stop.request("signal")

    @rare_collections()
    def run(self) -> Pulled:
        """Runs the task.

        :raises BroadwayError: If the broker or staging fails; messages without an outcome were
            released.
        """
        staged, served, env = self.staged, self.served, self.env
        if served.run.source.interval is not None and time_sinks(served):
            raise RequestRefused(
                "a sink has a time_column, and this operator stages nothing, so that the rows of a"
                " backfill could be deleted again: use a task group"
            )
        sweep(staged, self.pipeline, self.task, self.ports, self.source)
        move_letters(served, env)
        sinks = LocalCommits(served, env.generation, self.ports.connections)
        local = LocalRun(
            served,
            env,
            # The rate limit spans runs, since each may last only seconds.
            limiter=RateLimiter(served.producer.rate_limiting, state=StagedRateState(staged)),
            stop=self._stop,
            suspects=suspects_of(staged, served, env) if self.task.forks else None,
            host=self.ports.child,
            commit=sinks.commit_of,
        )
        prepare_sink(staged, served, env)
        started = staged.clock.now()
        try:
            with closing(sinks):
                report = local.pull(self.budget, on_lease=partial(open_generation, staged, served))
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            if local.report is not None:  # messages were settled before the error
                try:
                    self._record(local.report, started, failed=True)
                except BroadwayError as error:  # the first error is the one to raise
                    log.warning("The result of the run could not be recorded: %s", error)
            raise
        trouble = report.trouble(self.fail_when)
        self._record(report, started, failed=bool(trouble))
        send_depth(served, self.ports, self.metrics, staged)
        remove_old_runs(staged, self.pipeline)
        totals = report.totals()
        return Pulled({"summary": summary_line(totals), **totals}, trouble)

    def _record(self, report: RunReport, started: datetime, *, failed: bool) -> None:
        """Records, logs and counts the result of the run, also after an error."""
        run = self.staged
        record = run.generation(report.generation)
        record_settled(run, record, report.settled, progress=Progress(received=report.received))
        self.metrics.count(Metric.RECEIVED, report.received)
        self.metrics.count(Metric.FAILED, report.failed)
        self.metrics.settled(report.settled)
        for batcher, triggers in report.batches.items():
            for trigger, count in triggers.items():
                self.metrics.count(Metric.BATCHES, count, batcher=batcher, trigger=trigger)
        summary = {
            "totals": report.totals(),
            "balanced": report.balanced,
            "reasons": report.reasons,
            "errors": report.settled.errors,
        }
        for line in lines_of(summary):
            log.info("%s", line)
        if not report.received and self.task.try_number == 1:
            # With @continuous there are thousands of runs a day, most of them empty.  A later try
            # may have files of earlier tries, which are removed with the run.
            try:
                run.forget([report.generation])
                run.forget_open(report.generation)
            except StagingError as error:
                log.warning("Could not remove the files of an empty run: %s", error)
            return
        now = run.clock.now()
        run.publish(
            Manifest(
                generation=report.generation,
                root_id=run.store.root_id(),
                host=host_name(),
                lease=record.lease,
                received=report.received,
                received_bytes=report.received_bytes,
                failed=report.failed,
                settled_now=SettleReport().to_json(),
                batchers={},
                files={},
                entries=[],
                configured=False,
                dropped={},
                stopped=report.ended,
                started_at=started.isoformat(),
                ended_at=now.isoformat(),
                seconds=dict(report.seconds),
            )
        )
        keep_report(
            run,
            run.generations(),
            reasons=report.reasons,
            failed_tasks=[self.task.task_id] if failed else [],
            at=now,
        )


@dataclass
class BatchTask:
    """Groups the messages staged for one batcher into batches, and runs those of Python."""

    staged: StagedRun
    pipeline: Pipeline
    task: Task
    ports: Ports
    _: KW_ONLY
    batcher: str

    def __post_init__(self) -> None:
        self._batches: PythonBatches | None = None
        self._child: ChildProcess | None = None
        self._stopped = False
        #: The pipeline with the producer that delivered the planned messages.
        self._served = self.pipeline

    def plan(self, processed: Iterable[Mapping[str, Any]], *, label: str) -> BatchPlan | None:
        """Returns the plan of batches, new or of an earlier try; ``None`` if nothing was staged.

        A plan is empty if the run no longer holds the staged messages.

        :param processed: The references of the process tasks.
        :param label: Globally unique name of the try.
        :raises StagingError: If a process task staged under another root, staged messages cannot be
            read, or the plan cannot be written.
        """
        from airflow_broadway.staging.planner import plan_batches, planned_with_others

        references = list(processed)
        self.staged.store.check_roots(references)
        generations = [row["generation"] for row in references if row["batchers"].get(self.batcher)]
        if not generations:
            return None
        self._served = with_source(self.pipeline, source_of(self.staged, generations))
        if self.pipeline.batchers[self.batcher].sink is not None:
            settled = planned_with_others(self.staged, self.batcher, generations)
            if settled:
                self._run(lambda: self._settle_planned(settled))
        return plan_batches(self.staged, self._served, self.batcher, generations, try_label=label)

    def _settle_planned(self, generations: Sequence[str]) -> None:
        """Settles generations that are in a plan with others, as after a clear of one process task.

        In a new plan their messages would be in other batches, and be committed again.
        """
        custodians = Custodians(self.pipeline, self.ports, self.staged)
        with closing(custodians):
            for name in generations:
                log.warning(
                    "Generation %s was planned with others: it is settled by its outcomes, and"
                    " released without one.",
                    name,
                )
                record, connections = self.staged.generation(name), self.ports.connections
                settle(self.staged, record, self.pipeline, custodians.of, connections=connections)

    def handle(self, plan: BatchPlan) -> dict[str, int] | None:
        """Runs ``handle_batch`` on each batch without an outcome; ``None`` if the engine is Spark.

        :returns: Counts of batches, of messages by result, and of batches without an outcome, whose
            messages the run no longer holds or which were stopped.
        :raises BroadwayError: If the work of a child process raised.
        """
        if self.pipeline.batchers[self.batcher].engine != "python":
            return None
        isolation = Isolation(
            self.staged,
            self.pipeline,
            OpenPlans(self.staged, [plan.path]),
            self.task.file_name,
            folder=TRIES,
            connections=self.ports.connections,
            run=self._run,
            most=MOST_PROCESSES,
            cleared=self.task.cleared,
        )
        # A fork that cannot call the host would wait forever.
        forks, forked = self.task.forks, False
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
        with self._watcher(plan).standing_in():
            if forked or (forks and isolation.careful):
                return self._batches.count()
            return self._batches.run()

    def _run(self, work: Callable[[], object]) -> None:
        """Runs work on sinks; in a child process if batches may be handled in another."""
        if not self.task.forks:
            work()
            return
        self._child = child = ChildProcess(work)
        try:
            child.finish()
        finally:
            self._child = None

    def _handle_in_child(self, plan: BatchPlan, isolation: Isolation) -> str:
        """Runs batches in a child process, which may crash; returns the exception of its work."""
        batches = self._python_batches(plan, step=isolation.step, parent=isolation.parent)

        def work() -> None:
            # In the child: two processes cannot share one connection to the host.
            with self._watcher(plan).standing_in():
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

    def _watcher(self, plan: BatchPlan) -> RunWatcher:
        return RunWatcher(
            self.staged, self.pipeline, generations=plan.generations, ports=self.ports
        )

    def _python_batches(self, plan: BatchPlan, **child: Any) -> PythonBatches:
        from airflow_broadway.runs.python_batches import PythonBatches  # loads pyarrow

        return PythonBatches(
            self.staged,
            self._served,
            plan,
            name=self.task.file_name,
            try_number=self.task.try_number,
            ports=self.ports,
            **child,
        )

    def reference(self, plan: BatchPlan | None) -> dict[str, Any]:
        """Returns the reference of a plan for later tasks; no payload."""
        if plan is None or not plan.messages:
            return reference_without_plan(self.batcher)
        return {
            "plan": plan.path,
            "root_id": plan.root_id,
            "host": plan.host,
            "batcher": self.batcher,
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
