"""The Dag of ``docs/backfills.md``: one data interval a day, live runs and backfills."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import CronDataIntervalTimetable

from tests.integration.backfills.kept_flights import KeptFlights

dag = KeptFlights(context={"output": "{{ var.value.flights_output }}"}).dag(
    "kept_flights",
    schedule=CronDataIntervalTimetable("@daily", timezone="UTC"),
    start_date=datetime(2013, 1, 1, tzinfo=UTC),
    max_active_runs=4,
)
