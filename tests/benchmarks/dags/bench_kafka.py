"""The DAG of ``make bench`` that drains a topic of Kafka in Airflow."""

from __future__ import annotations

from airflow.sdk import DAG

from tests.benchmarks.pipelines import SPARK, KafkaPipeline

with DAG("bench_kafka", schedule=None, params=KafkaPipeline.params()):
    KafkaPipeline(producer={"conn_id": "bench_kafka"}).task_group(
        spark={"conf": SPARK}, ack={"mode": "poke", "poke_interval": 1.0}
    )
