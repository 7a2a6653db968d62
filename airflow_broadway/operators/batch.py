"""Group staged messages into batches; run them too, where ``handle_batch`` is plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowException, AirflowSkipException, BaseOperator

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.text import many, without_outcome
from airflow_broadway.operators import _docs
from airflow_broadway.operators._common import (
    check_engine,
    declared,
    load_pipeline,
    open_run,
    pipeline_ref,
    references,
    task_name,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["BroadwayBatcherOperator"]


class BroadwayBatcherOperator(BaseOperator):
    """Group the messages that process tasks staged for one batcher into batches.

    Returns a reference to the plan of batches, never payloads.  Skips itself when there is no
    message for the batcher; its reference then has no plan.  With ``engine="python"`` it also runs
    ``handle_batch`` on each batch that has no outcome yet.

    :param pipeline: As for :class:`BroadwayProcessorOperator`. (templated)
    :param batcher: The batcher's name.
    :param processed: The outputs of the process tasks. (templated)
    :param staging: URI of the staging root; ``[broadway] staging`` unless given. (templated)
    :raises OptionsError: While the Dag is parsed, if the pipeline has no such batcher.
    """

    template_fields: Sequence[str] = ("pipeline", "processed", "staging")
    template_fields_renderers = {"pipeline": "json"}  # noqa: RUF012 - as in BaseOperator
    ui_color = "#e6f4ea"

    def __init__(
        self,
        *,
        pipeline: Any,
        batcher: str,
        processed: Any,
        staging: str | None = None,
        **kwargs: Any,
    ) -> None:
        # A process task that failed for good left nothing here; the others' messages go on.
        kwargs.setdefault("trigger_rule", "all_done")
        kwargs.setdefault("doc_md", _docs.BATCH)
        super().__init__(**kwargs)
        self.pipeline = pipeline_ref(pipeline)
        check_engine(self.pipeline)
        known = declared(self.pipeline)
        if known is not None and batcher not in known.batchers:
            raise OptionsError.unknown(f"batchers.{batcher}", self.task_id, known.batchers)
        self.batcher = batcher
        self.processed = processed
        self.staging = staging

    def execute(self, context: Context) -> dict[str, Any]:
        from airflow_broadway.staging.planner import plan_batches

        pipeline = load_pipeline(self.pipeline, context)
        run = open_run(context, self.staging, pipeline.name)
        generations = [
            each["generation"]
            for each in references(self.processed)
            if each["batchers"].get(self.batcher)
        ]
        ti = context["ti"]
        if not generations:
            self._nothing(context)
            raise AirflowSkipException(f"No message for the batcher {self.batcher!r}.")
        plan = plan_batches(
            run, pipeline, self.batcher, generations, try_label=f"{ti.try_number}-{ti.id}"[:40]
        )
        if not plan.messages:
            self._nothing(context)
            raise AirflowSkipException(
                f"No message for the batcher {self.batcher!r} that this run still holds: they are"
                " settled, or were given back.  To handle batches again that were handled:"
                f" airflow-broadway replay --dag-id {run.dag_id} --run-id {run.run_id}"
            )
        self.log.info(
            "%s in %s, by trigger: %s.",
            many(plan.messages, "message"),
            many(plan.batches, "batch"),
            plan.triggers,
        )
        reference: dict[str, Any] = {
            "plan": plan.path,
            "batcher": self.batcher,
            "messages": plan.messages,
            "batches": plan.batches,
            "triggers": plan.triggers,
        }
        if pipeline.batchers[self.batcher].engine == "python":
            reference["outcomes"] = self._handle(run, pipeline, plan, context)
        return reference

    def _nothing(self, context: Context) -> None:
        """Push a reference without a plan: Airflow logs an error for an output that is missing."""
        reference = {"plan": None, "batcher": self.batcher, "messages": 0, "batches": 0}
        context["ti"].xcom_push(key="return_value", value=reference)

    def _handle(self, run: Any, pipeline: Any, plan: Any, context: Context) -> dict[str, int]:
        from airflow_broadway.runs.python_batches import PythonBatches
        from airflow_broadway.runs.stand_in import StandIn

        ti = context["ti"]
        batches = PythonBatches(run, pipeline, plan, name=task_name(ti), try_number=ti.try_number)
        self._batches = batches
        guard = StandIn(run, pipeline, plan.generations)
        guard.start()
        try:
            counts = batches.run()
        finally:
            guard.finish()
        if counts["without_outcome"]:
            raise AirflowException(
                f"{without_outcome(counts['without_outcome'], plan.batches)}: the run no"
                " longer holds their messages, or was stopped; clear `process` to receive them"
                " again"
            )
        return counts

    def on_kill(self) -> None:
        batches = getattr(self, "_batches", None)
        if batches is not None:
            batches.stop()
