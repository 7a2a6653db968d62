"""The DAGs of ``make bench`` that drain RabbitMQ in Airflow, with one producer and with two."""

from __future__ import annotations

from airflow.sdk import DAG

from tests.benchmarks.pipelines import SPARK, OnRabbitMQ

for producers in (1, 2):
    with DAG(f"bench_rabbitmq_{producers}", schedule=None, params=OnRabbitMQ.params()) as dag:
        OnRabbitMQ(
            producer={"uri": None, "conn_id": "bench_rabbitmq", "concurrency": producers}
        ).task_group(spark={"conf": SPARK}, ack={"mode": "poke", "poke_interval": 1.0})
    globals()[dag.dag_id] = dag
