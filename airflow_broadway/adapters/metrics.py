"""Sends metrics with Airflow's ``Stats``."""

from __future__ import annotations

from collections.abc import Mapping

from airflow.providers.common.compat.sdk import Stats

from airflow_broadway.runs.metrics import MetricSink


class AirflowMetrics(MetricSink):
    """Sends metrics to Airflow's own backend: StatsD, OpenTelemetry, or none."""

    def count(self, name: str, count: int, tags: Mapping[str, str]) -> None:
        """Adds to a counter."""
        Stats.incr(name, count, tags=dict(tags))

    def gauge(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        """Sets a gauge."""
        Stats.gauge(name, value, tags=dict(tags))

    def seconds(self, name: str, seconds: float, tags: Mapping[str, str]) -> None:
        """Records a duration; Airflow's timers use milliseconds."""
        Stats.timing(name, seconds * 1000.0, tags=dict(tags))
