"""The DAGs of the cluster: flights to a bucket, and to a table by Spark."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG
from cluster_pipeline import ClusterFlights, KafkaFlights, SparkFlights, SqsFlights


def make(dag_id: str, pipeline: type[ClusterFlights], **options: Any) -> None:
    with DAG(
        dag_id,
        schedule=None,
        catchup=False,
        max_active_runs=1,
        default_args={"retries": 5, "retry_delay": timedelta(seconds=2)},
    ):
        pipeline().task_group(process={"max_seconds": 120}, ack={"deferrable": True}, **options)


make("cluster_flights", ClusterFlights)
make("cluster_sqs", SqsFlights)
make("cluster_kafka", KafkaFlights)
make(
    "cluster_spark",
    SparkFlights,
    spark={
        "conn_id": "cluster_spark",
        "executor_memory": "512m",
        "conf": {
            "spark.jars": os.environ.get("CLUSTER_JARS", ""),
            "spark.sql.shuffle.partitions": 2,
            "spark.ui.enabled": "false",
        },
    },
)
