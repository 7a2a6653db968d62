"""A pipeline's overrides as a run had them: templates are rendered by tasks alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from airflow.models.renderedtifields import RenderedTaskInstanceFields
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_broadway.plugin.declared import Declared

__all__ = ["UNFILLED", "has_template", "reference_of"]

#: Why a broker cannot be asked where a template is left.
UNFILLED: Final = (
    "an option of its producer is a template that no run has filled in yet, or that Airflow masks"
)


def reference_of(pipeline: Declared) -> Mapping[str, Any]:
    """The reference by which a pipeline's queue can be found outside a task.

    Where the producer's options have templates, it is as the last task had it; and as it is
    declared where no task has run yet, or Airflow masked it.
    """
    declared = pipeline.reference
    if not has_template(declared):
        return declared
    last = (
        select(RenderedTaskInstanceFields.rendered_fields)
        .join(RenderedTaskInstanceFields.task_instance)
        .where(
            RenderedTaskInstanceFields.dag_id == pipeline.dag_id,
            RenderedTaskInstanceFields.task_id == pipeline.task_id,
        )
        .order_by(TaskInstance.start_date.desc())
        .limit(1)
    )
    with create_session() as session:
        found = session.scalars(last).first()
    rendered = (found or {}).get("pipeline")
    if not isinstance(rendered, Mapping) or rendered.get("class") != declared["class"]:
        return declared
    masked = "***" in json.dumps(_producer(rendered), default=str)
    return declared if masked else {"class": rendered["class"], "options": rendered["options"]}


def has_template(reference: Mapping[str, Any]) -> bool:
    """Whether a reference does not say yet which queue it is."""
    return "{{" in json.dumps(_producer(reference), default=str)


def _producer(reference: Mapping[str, Any]) -> Any:
    return (reference.get("options") or {}).get("producer")
