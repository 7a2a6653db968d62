"""A whole run in one task with leases at the broker; only results are staged, no messages.

For pipelines whose batchers are all Python: messages are handled, batched, and settled at their
broker as soon as they have an outcome.
"""

from __future__ import annotations

import logging
import uuid
from datetime import datetime
from typing import Any, NamedTuple

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.run_summary import lines_of, summary_line
from airflow_broadway.core.errors import BroadwayError, StagingError
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.local.report import RunReport
from airflow_broadway.core.local.run import LocalRun
from airflow_broadway.core.model.run_source import RunSource
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.runs.account import keep_report
from airflow_broadway.runs.metrics import Metric, Metrics
from airflow_broadway.runs.poison.suspects import suspects_of
from airflow_broadway.runs.ports import Ports, Task, producer_env
from airflow_broadway.runs.sources.dead_letters import move_letters
from airflow_broadway.runs.sources.pipelines import with_source
from airflow_broadway.runs.sources.prepare import prepare_sink
from airflow_broadway.runs.sweep import remove_old_runs, sweep
from airflow_broadway.runs.tasks import send_depth
from airflow_broadway.staging.rate_state import StagedRateState
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.settling.journal import Progress, record_settled
from airflow_broadway.staging.store import host_name

log = logging.getLogger(__name__)


class UnstagedResult(NamedTuple):
    """The result of a run in one task.

    :param reference: The reference for later tasks; no payload.
    :param trouble: A problem that needs attention; empty if there is none.
    """

    reference: dict[str, Any]
    trouble: str


class UnstagedTask:
    """Receives within a budget, handles, batches and settles, all in this task.

    :param index: Index of the pipeline's producer, from 0; ``None`` if it is the only one.
    :param source: The source of the messages; default: the live queue.
    :param fail_when: See :func:`airflow_broadway.core.custody.run_summary.failures_trouble`.
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
        fail_when: Any = "all",
        source: RunSource | None = None,
    ) -> None:
        self._run = run
        self._pipeline = pipeline
        self._task = task
        self._ports = ports
        self._index = index
        self._budget = budget
        self._fail_when = fail_when
        self._source = source or RunSource()
        self._stop = Stop(run.clock, min(pipeline.shutdown, ports.max_shutdown))

    def stop(self) -> None:
        """Stops receiving and ends soon.  Called from a signal handler."""
        self._stop.request("signal")

    def run(self) -> UnstagedResult:
        """Runs the task.

        :raises BroadwayError: If the broker or staging fails; messages without an outcome were
            released.
        """
        pipeline, ports, run = self._pipeline, self._ports, self._run
        sweep(run, pipeline, self._task, ports, self._source)
        pipeline = with_source(pipeline, self._source)
        env = producer_env(
            pipeline,
            ports,
            generation=uuid.uuid4().hex,
            owner=self._task.owner(),
            index=self._index,
            store=run.store,
            clock=run.clock,
        )
        move_letters(pipeline, env)
        # The rate limit spans runs, since each may last only seconds.
        limiter = RateLimiter(pipeline.producer.rate_limiting, state=StagedRateState(run))
        local = LocalRun(
            pipeline,
            env,
            limiter=limiter,
            stop=self._stop,
            suspects=suspects_of(run, pipeline, env) if self._task.forks else None,
            host=ports.child,
        )
        prepare_sink(run, pipeline, env)
        started = run.clock.now()
        try:
            report = local.pull(self._budget, on_lease=self._open)
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            if local.report is not None:  # messages were settled before the error
                try:
                    self._record(local.report, started, failed=True)
                except BroadwayError as error:  # the first error is the one to raise
                    log.warning("The result of the run could not be recorded: %s", error)
            raise
        trouble = report.trouble(self._fail_when)
        self._record(report, started, failed=bool(trouble))
        metrics = Metrics(ports.metrics, pipeline=pipeline.name, dag_id=run.dag_id)
        send_depth(pipeline, ports, metrics, run)
        remove_old_runs(run, self._pipeline)
        totals = report.totals()
        return UnstagedResult({"summary": summary_line(totals), **totals}, trouble)

    def _open(self, lease: Lease) -> None:
        self._run.open_generation(
            lease=lease,
            task_id=self._task.task_id,
            map_index=self._task.map_index,
            try_number=self._task.try_number,
            source=self._source.to_json(),
        )

    def _record(self, report: RunReport, started: datetime, *, failed: bool) -> None:
        """Records, logs and counts the result of the run, also after an error."""
        run = self._run
        record = run.generation(report.generation)
        record_settled(run, record, report.settled, progress=Progress(received=report.received))
        self._count(report)
        summary = {
            "totals": report.totals(),
            "balanced": report.balanced,
            "reasons": report.reasons,
            "errors": report.settled.errors,
        }
        for line in lines_of(summary):
            log.info("%s", line)
        if not report.received and self._task.try_number == 1:
            # With @continuous there are thousands of runs a day, most of them empty.  A later try
            # may have files of earlier tries, which are removed with the run.
            try:
                run.forget(report.generation)
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
            batchers={},
            reasons=report.reasons,
            failed_tasks=[self._task.task_id] if failed else [],
            at=now,
        )

    def _count(self, report: RunReport) -> None:
        metrics = Metrics(
            self._ports.metrics, pipeline=self._pipeline.name, dag_id=self._run.dag_id
        )
        metrics.count(Metric.RECEIVED, report.received)
        metrics.count(Metric.FAILED, report.failed)
        metrics.settled(report.settled)
        for batcher, triggers in report.batches.items():
            for trigger, count in triggers.items():
                metrics.count(Metric.BATCHES, count, batcher=batcher, trigger=trigger)
