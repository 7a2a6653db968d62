"""A Dag for Airflow's form of "Trigger": runs by hand and runs by schedule have a queue each."""

from __future__ import annotations

from datetime import UTC, datetime

from form_pipeline import Orders  # type: ignore[import-not-found]

# It is paused until it is triggered: then its one scheduled run begins, too.
Orders(producer={"queue": "{{ run_id.partition('__')[0] }}"}).dag(
    "form",
    schedule="@once",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    is_paused_upon_creation=True,
    default_args={"retries": 0},
)
