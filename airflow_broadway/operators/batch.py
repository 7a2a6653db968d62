"""Group staged messages into batches; run them too, where ``handle_batch`` is plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowException, AirflowSkipException, BaseOperator

from airflow_broadway.core.errors import OptionsError
from airflow_broadway.operators._common import (
    check_engine,
    declared,
    load_pipeline,
    open_run,
    pipeline_ref,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["BroadwayBatcherOperator"]


class BroadwayBatcherOperator(BaseOperator):
    """Group the messages that process tasks staged for one batcher into batches.

    Returns a reference to the plan of batches, never payloads.  Skips itself when there is no
    message for the batcher.  With ``engine="python"`` it also runs ``handle_batch`` on each batch
    that has no outcome yet.

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
        references = [each for each in _references(self.processed) if each]
        generations = [
            each["generation"] for each in references if each["batchers"].get(self.batcher)
        ]
        if not generations:
            raise AirflowSkipException(f"No message for the batcher {self.batcher!r}.")
        ti = context["ti"]
        plan = plan_batches(
            run, pipeline, self.batcher, generations, try_label=f"{ti.try_number}-{ti.id}"[:40]
        )
        if not plan.messages:
            raise AirflowSkipException(
                f"No message for the batcher {self.batcher!r} that this run still holds."
            )
        self.log.info(
            "%d messages in %d batches, by trigger: %s.", plan.messages, plan.batches, plan.triggers
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

    def _handle(self, run: Any, pipeline: Any, plan: Any, context: Context) -> dict[str, int]:
        from airflow_broadway.operators._batches import PythonBatches
        from airflow_broadway.operators._guard import Guard

        batches = PythonBatches(run, pipeline, plan, try_number=context["ti"].try_number)
        self._batches = batches
        guard = Guard(run, pipeline, plan.generations)
        guard.start()
        try:
            counts = batches.run()
        finally:
            guard.finish()
        if counts["without_outcome"]:
            raise AirflowException(
                f"{counts['without_outcome']} of {plan.batches} batches have no outcome: the run no"
                " longer holds their messages, or was stopped; clear `process` to receive them"
                " again"
            )
        return counts

    def on_kill(self) -> None:
        batches = getattr(self, "_batches", None)
        if batches is not None:
            batches.stop()


def _references(processed: Any) -> list[Mapping[str, Any] | None]:
    """The references in whatever a template renders: one, a list, a mapped task's sequence."""
    if processed is None or isinstance(processed, Mapping):
        return [processed]
    return [reference for each in processed for reference in _references(each)]
