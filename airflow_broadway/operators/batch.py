"""Groups staged messages into batches, and runs them if ``handle_batch`` is plain Python."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowException, AirflowSkipException, BaseOperator

from airflow_broadway.adapters import task_docs
from airflow_broadway.adapters.host import Host, references
from airflow_broadway.adapters.lineage import LineageMixin, report_execution
from airflow_broadway.adapters.links import ALL_TASKS
from airflow_broadway.adapters.outlets import emit_outlet_events
from airflow_broadway.adapters.parsing import check_engine, declared, pipeline_ref
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.text import pluralize, without_outcome

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.core.pipeline import Pipeline
    from airflow_broadway.runs.tasks import BatchTask
    from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["BroadwayBatcherOperator"]


class BroadwayBatcherOperator(LineageMixin, BaseOperator):
    """Groups the messages that process tasks staged for one batcher into batches.

    Returns a reference to the plan of batches, never payloads.  Skips itself when there is no
    message for the batcher; its reference then has no plan.  With ``engine="python"`` it also runs
    ``handle_batch`` on each batch that has no outcome yet.

    :param pipeline: As for :class:`BroadwayProcessorOperator`. (templated)
    :param batcher: The batcher's name.
    :param processed: The outputs of the process tasks. (templated)
    :param staging: URI of the staging root; by default ``[broadway] staging``. (templated)
    :raises OptionsError: While the Dag is parsed, if the pipeline has no such batcher.
    """

    template_fields: Sequence[str] = ("pipeline", "processed", "staging")
    template_fields_renderers = {"pipeline": "json"}  # noqa: RUF012 - as in BaseOperator
    ui_color = "#e6f4ea"
    operator_extra_links = ALL_TASKS

    def __init__(
        self,
        *,
        pipeline: Any,
        batcher: str,
        processed: Any,
        staging: str | None = None,
        **kwargs: Any,
    ) -> None:
        # A failed process task staged nothing for this task; the others' messages are batched.
        kwargs.setdefault("trigger_rule", "all_done")
        kwargs.setdefault("doc_md", task_docs.BATCH)
        super().__init__(**kwargs)
        self.pipeline = pipeline_ref(pipeline, "batch")
        check_engine(self.pipeline)
        known = declared(self.pipeline)
        if known is not None and batcher not in known.batchers:
            raise OptionsError.unknown(f"batchers.{batcher}", self.task_id, known.batchers)
        self.batcher = batcher
        self.processed = processed
        self.staging = staging

    _task: BatchTask | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow_broadway.core.formats.plan import reference_without_plan

        host, ti = Host(context), context["ti"]
        processed = list(references(self.processed))
        if not any(row["batchers"].get(self.batcher) for row in processed):
            # The staging folder, which may be a bucket, is not opened for nothing.
            ti.xcom_push(key="return_value", value=reference_without_plan(self.batcher))
            raise AirflowSkipException(f"No message for the batcher {self.batcher!r}.")
        from airflow_broadway.runs.outcomes import run_again_command
        from airflow_broadway.runs.sources.pipelines import source_of
        from airflow_broadway.runs.tasks import BatchTask

        pipeline = host.load_pipeline(self.pipeline)
        run = host.open_run(self.staging, pipeline)
        self._task = task = BatchTask(run, pipeline, host.task, host.ports, batcher=self.batcher)
        plan = task.plan(processed, label=f"{ti.try_number}-{ti.id}"[:40])
        reference = task.reference(plan)
        if plan is None or not plan.messages:
            # Pushed all the same: Airflow logs an error for a missing output.
            ti.xcom_push(key="return_value", value=reference)
            raise AirflowSkipException(
                f"No message for the batcher {self.batcher!r} that this run still holds: they are"
                " settled, or were released.  To handle batches again that were handled:"
                f" {run_again_command(run.dag_id, run.run_id)}"
            )
        self.log.info(
            "%s in %s, by trigger: %s.",
            pluralize(plan.messages, "message"),
            pluralize(plan.batches, "batch"),
            plan.triggers,
        )
        counts = task.handle(plan)
        report_execution(
            self,
            pipeline,
            host.ports.connections,
            {**reference, **(counts or {})},
            lambda: source_of(run, plan.generations),
        )
        if counts is None:
            self._emit_no_events(context, run, pipeline)
            return reference
        if counts["without_outcome"]:
            raise AirflowException(
                f"{without_outcome(counts['without_outcome'], plan.batches)}: the run no"
                " longer holds their messages, or was stopped; clear `process` to receive them"
                " again"
            )
        emit_outlet_events(self, context, run, pipeline, [plan])
        return {**reference, "outcomes": counts}

    def _emit_no_events(self, context: Context, run: StagedRun, pipeline: Pipeline) -> None:
        """Drops the outlets: Spark handles the batches, so this task updates no asset."""
        if self.outlets:
            self.log.warning(
                "Spark handles the batches of %r: this task's outlets get no event.  Add them to"
                " the Spark task: spark={'outlets': […]}, or to the batcher's own outlets.",
                self.batcher,
            )
        emit_outlet_events(self, context, run, pipeline, [])

    def _writing_batchers(self, pipeline: Pipeline) -> Collection[str]:
        return (self.batcher,) if pipeline.batchers[self.batcher].engine == "python" else ()

    def on_kill(self) -> None:
        if self._task is not None:
            self._task.stop()
