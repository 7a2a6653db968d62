"""Dags of one topic whose hours are archived and backfilled: ``hours_python``, ``hours_spark``."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import CronDataIntervalTimetable
from kept_hours_pipeline import HoursInPython, HoursOnSpark  # type: ignore[import-not-found]

for name, pipeline in (("hours_python", HoursInPython), ("hours_spark", HoursOnSpark)):
    globals()[name] = pipeline(context={"rows": "{{ var.value.hours_rows }}"}).dag(
        name,
        schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"),
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=2,
    )
