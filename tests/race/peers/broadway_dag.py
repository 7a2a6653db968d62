"""The DAG of an Airflow: a run every five seconds, and two at a time."""

from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG
from broadway_pipeline import BUDGET, Rows

with DAG(
    "race",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    schedule=timedelta(seconds=5),
    max_active_runs=2,
) as dag:
    Rows().task_group(process=BUDGET)
