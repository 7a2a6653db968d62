"""Run a pipeline whose batchers are all Python in one task, on real custody."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.run_summary import check_fail_when, lines_of
from airflow_broadway.core.errors import BroadwayError, StagingError
from airflow_broadway.core.formats.manifest import Manifest
from airflow_broadway.core.local.engine import check_engines
from airflow_broadway.operators import _docs
from airflow_broadway.operators._common import (
    MAX_SHUTDOWN,
    AirflowConnections,
    declared,
    load_pipeline,
    open_run,
    owner_of,
    producer_env,
)
from airflow_broadway.operators._metrics import Metric, Metrics
from airflow_broadway.operators.process import PullOperator, budget_of, refuse_backfill

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.core.custody.protocol import Lease
    from airflow_broadway.core.local.run import RunReport
    from airflow_broadway.core.stages.stop import Stop
    from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["BroadwayRunOperator"]


class BroadwayRunOperator(PullOperator):
    """Run a pipeline whose batchers are all ``engine="python"`` in this one task.

    Nothing is staged: messages are handled, batched and settled at their broker as their outcomes
    come.  The choice for low latency, with ``schedule="@continuous"`` and ``wait_seconds``, so that
    a quiet queue does not fill the metadata database with empty runs.

    The arguments are those of :class:`BroadwayProcessorOperator`, and:

    :param fail_when: As for :class:`BroadwayAckSensor`.
    :raises PipelineError: If a batcher runs on Spark: while the Dag is parsed where the pipeline is
        given as a class or an instance, else when the task runs.
    """

    _about = _docs.RUN

    _stop: Stop | None = None

    def __init__(self, *, fail_when: str | float = "all", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fail_when = check_fail_when(f"{self.task_id}.fail_when", fail_when)

    @classmethod
    def _check_engine(cls, ref: Mapping[str, Any]) -> None:
        super()._check_engine(ref)
        pipeline = declared(ref)
        if pipeline is not None:
            check_engines(pipeline)

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow_broadway.core.clock import SystemClock
        from airflow_broadway.core.local.run import LocalRun
        from airflow_broadway.core.stages.rate_limiter import RateLimiter
        from airflow_broadway.core.stages.stop import Stop
        from airflow_broadway.runs.sweep import give_back
        from airflow_broadway.staging.rate_state import StagedRateState

        pipeline = load_pipeline(self.pipeline, context)
        refuse_backfill(context, pipeline.producer.kind)
        run = open_run(context, self.staging, pipeline.name)
        connections = AirflowConnections()
        give_back(run, pipeline, context, connections)
        generation = uuid.uuid4().hex
        ti = context["ti"]
        budget = budget_of(self, context)
        self._stop = Stop(SystemClock(), min(pipeline.shutdown, MAX_SHUTDOWN))

        def opened(lease: Lease) -> None:
            run.open_generation(
                lease=lease,
                task_id=ti.task_id,
                map_index=-1 if ti.map_index is None else ti.map_index,
                try_number=ti.try_number,
            )

        env = producer_env(
            pipeline,
            generation=generation,
            owner=owner_of(context),
            index=self.producer_index,
            store=run.store,
            connections=connections,
        )
        # Of all runs together: each may be over within seconds.
        limiter = RateLimiter(pipeline.producer.rate_limiting, state=StagedRateState(run))
        local = LocalRun(pipeline, env, limiter=limiter, stop=self._stop)
        started = SystemClock().now()
        try:
            report = local.pull(budget, on_lease=opened)
        except BaseException:
            if local.report is not None:  # it had settled before it broke
                try:
                    self._record(run, local.report, started, failed=True)
                except BroadwayError as error:  # the first error is the one to show
                    self.log.warning("What the run did could not be recorded: %s", error)
            raise
        trouble = report.trouble(self.fail_when)
        self._record(run, report, started, failed=bool(trouble))
        self._clear_up(run)
        if trouble:  # everything is settled: trying again would only take more
            raise AirflowFailException(f"All messages are settled or given back, but {trouble}")
        return {**report.totals(), "errors": list(report.settled.errors)}

    def _record(
        self, run: StagedRun, report: RunReport, started: datetime, *, failed: bool
    ) -> None:
        """Keep and tell what the run did, however it ended."""
        from airflow_broadway.runs.account import keep_report
        from airflow_broadway.staging.settlement_journal import Progress, record_settled
        from airflow_broadway.staging.store import host_name

        record = run.generation(report.generation)
        record_settled(run, record, report.settled, progress=Progress(received=report.received))
        self._tell(report, Metrics(run.pipeline, run.dag_id))
        about = {"totals": report.totals(), "balanced": report.balanced, "reasons": report.reasons}
        for line in lines_of(about):
            self.log.info("%s", line)
        self.log.info("All of it: %s", report.to_json())
        if not report.received:
            # With @continuous there are thousands of runs in a day, most of them empty.
            try:
                run.forget(report.generation)
            except StagingError as error:
                self.log.warning("Could not remove the files of an empty run: %s", error)
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
            failed_tasks=[self.task_id] if failed else [],
            at=now,
        )

    @staticmethod
    def _tell(report: RunReport, metrics: Metrics) -> None:
        metrics.count(Metric.RECEIVED, report.received)
        metrics.count(Metric.FAILED, report.failed)
        metrics.settled(report.settled)
        for batcher, triggers in report.batches.items():
            for trigger, count in triggers.items():
                metrics.count(Metric.BATCHES, count, batcher=batcher, trigger=trigger)

    def _clear_up(self, run: StagedRun) -> None:
        """Remove what has been kept for long enough."""
        from airflow_broadway.staging.retention import sweep_retention

        try:
            sweep_retention(run.store, run.pipeline, run.dag_id, spared=[run.run_id])
        except BroadwayError as error:
            self.log.warning("Could not remove the files of old runs: %s", error)

    def on_kill(self) -> None:
        if self._stop is not None:
            self._stop.request("signal")
