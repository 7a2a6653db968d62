"""Operators that a Dag author derived from ours."""

from __future__ import annotations

from typing import Any

from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.sensors.ack import BroadwayAckSensor


class Pull(BroadwayProcessorOperator):
    """Has a field more, and says nothing of our links."""

    template_fields = (*BroadwayProcessorOperator.template_fields, "team")
    operator_extra_links = ()

    def __init__(self, *, team: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.team = team


class Batch(BroadwayBatcherOperator):
    custom_operator_name = "Ours"


class Submit(BroadwaySparkSubmitOperator):
    ui_color = "#ffffff"


class Ack(BroadwayAckSensor):
    """As it is."""


class AllInOne(BroadwayRunOperator):
    """Always the same pipeline's."""
