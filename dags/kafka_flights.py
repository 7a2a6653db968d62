"""The demo's DAG with Apache Kafka instead of the embedded queue.

The Airflow connection `kafka_default` names the brokers; `python -m scripts.load_kafka` creates its
topics, and fills the topic `flights`.  See `docs/kafka.md`.
"""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, Param
from kafka_flights_pipeline import KafkaFlights

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "build" / "demo" / "kafka"

with DAG(
    "kafka_flights",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params={
        **KafkaFlights.params(),
        "output": Param(str(OUTPUT), type="string", description="The folder of the Parquet files."),
    },
    tags=["airflow-broadway", "demo", "kafka"],
    doc_md=__doc__,
) as dag:
    table = {"sink": {"path": "{{ params.output }}/flights"}}
    KafkaFlights(batchers={"delayed": table, "on_time": table}).task_group(
        spark={
            # The pipeline's module is shipped automatically, that of its base class is not.
            "py_files": str(HERE / "flights_pipeline.py"),
            "conf": {
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.sql.shuffle.partitions": "2",
                "spark.ui.enabled": "false",
            },
        },
    )
