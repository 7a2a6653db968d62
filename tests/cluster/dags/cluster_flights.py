"""The flights of the demo on several hosts: from RabbitMQ to JSON lines in a bucket."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG
from cluster_pipeline import ClusterFlights

with DAG(
    "cluster_flights",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 5, "retry_delay": timedelta(seconds=2)},
):
    ClusterFlights().task_group(process={"max_seconds": 120}, ack={"deferrable": True})
