"""Run a pipeline whose batchers are all Python in one task, on real custody."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowException

from airflow_broadway.core.engine import check_engines
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.operators._common import (
    AirflowConnections,
    declared,
    load_pipeline,
    open_run,
    owner_of,
    producer_env,
)
from airflow_broadway.operators.process import PullOperator, budget_of, refuse_backfill

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.core.custody import Lease
    from airflow_broadway.core.local import RunReport
    from airflow_broadway.staging.run import StagedRun

__all__ = ["BroadwayRunOperator"]


class BroadwayRunOperator(PullOperator):
    """Run a pipeline whose batchers are all ``engine="python"`` in this one task.

    Nothing is staged: messages are handled, batched and settled at their broker as their outcomes
    come.  The choice for low latency, with ``schedule="@continuous"`` and ``wait_seconds``, so that
    a quiet queue does not fill the metadata database with empty runs.

    The arguments are those of :class:`BroadwayProcessorOperator`.

    :raises PipelineError: If a batcher runs on Spark: while the Dag is parsed where the pipeline is
        given as a class or an instance, else when the task runs.
    """

    _stopped = ""

    @classmethod
    def _check_engine(cls, ref: Mapping[str, Any]) -> None:
        super()._check_engine(ref)
        pipeline = declared(ref)
        if pipeline is not None:
            check_engines(pipeline)

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow_broadway.core.local import run_local
        from airflow_broadway.core.rate_limiter import RateLimiter
        from airflow_broadway.operators._sweep import give_back
        from airflow_broadway.staging.rate import StagedRateState
        from airflow_broadway.staging.settlement import record_settled

        pipeline = load_pipeline(self.pipeline, context)
        refuse_backfill(context, pipeline.producer.kind)
        run = open_run(context, self.staging, pipeline.name)
        connections = AirflowConnections()
        give_back(run, pipeline, context, connections)
        generation = uuid.uuid4().hex
        ti = context["ti"]
        budget = budget_of(self, context)

        def opened(lease: Lease) -> None:
            run.open_generation(
                lease=lease,
                task_id=ti.task_id,
                map_index=-1 if ti.map_index is None else ti.map_index,
                try_number=ti.try_number,
            )

        report = run_local(
            pipeline,
            max_messages=budget.max_messages,
            max_bytes=budget.max_bytes,
            max_seconds=budget.max_seconds,
            wait_seconds=budget.wait_seconds,
            idle_seconds=budget.idle_seconds,
            env=producer_env(
                pipeline,
                generation=generation,
                owner=owner_of(context),
                index=self.producer_index,
                store=run.store,
                connections=connections,
            ),
            # Of all runs together: each may be over within seconds.
            limiter=RateLimiter(pipeline.producer.rate_limiting, state=StagedRateState(run)),
            stop=lambda: self._stopped,
            on_lease=opened,
        )
        record_settled(run, run.generation(generation), report.settled)
        self.log.info("Done: %s", report.to_json())
        if not report.balanced:
            raise AirflowException(f"The sum does not balance: {report.to_json()}")
        self._clear_up(run, generation, report)
        settled = report.settled.to_json()
        return {"received": report.received, "failed": report.failed, **settled}

    def _clear_up(self, run: StagedRun, generation: str, report: RunReport) -> None:
        """Remove what has been kept for long enough, and at once what tells of nothing.

        With ``@continuous`` there are thousands of runs in a day, most of them empty.
        """
        from airflow_broadway.staging.retention import mark_balanced, sweep_retention

        try:
            if report.received:
                mark_balanced(run)
            else:
                run.forget(generation)
            sweep_retention(run.store, run.pipeline, run.dag_id, spared=[run.run_id])
        except BroadwayError as error:
            self.log.warning("Could not remove the files of old runs: %s", error)

    def on_kill(self) -> None:
        self._stopped = "signal"
