"""The DAGs of ``make bench`` that drain RabbitMQ in Airflow: with one producer, with two, and with
one and a Spark Connect server.
"""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import DAG

from tests.benchmarks.pipelines import SPARK, RabbitMQPipeline

CONNECT = os.environ.get("BENCH_CONNECT", "sc://127.0.0.1:15002")
ENGINES: dict[str, dict[str, Any]] = {"1": {"conf": SPARK}, "2": {"conf": SPARK}}
ENGINES["connect"] = {"remote": CONNECT}

for name, spark in ENGINES.items():
    with DAG(f"bench_rabbitmq_{name}", schedule=None, params=RabbitMQPipeline.params()) as dag:
        concurrency = 2 if name == "2" else 1
        producer = {"uri": None, "conn_id": "bench_rabbitmq", "concurrency": concurrency}
        RabbitMQPipeline(producer=producer).task_group(
            spark=spark,
            # As for docs/performance.md.
            process={"idle_seconds": 0.2},
            ack={"mode": "poke", "poke_interval": 0.5},
        )
    globals()[dag.dag_id] = dag
