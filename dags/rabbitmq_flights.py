"""The demo's DAG with RabbitMQ instead of the embedded queue.

The Airflow connection `rabbitmq_default` has the broker's address; `python -m
scripts.load_rabbitmq` fills the queue `flights`.  See `docs/rabbitmq.md`.
"""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, Param
from rabbitmq_flights_pipeline import RabbitMQFlights

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "build" / "demo" / "rabbitmq"

with DAG(
    "rabbitmq_flights",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params={
        **RabbitMQFlights.params(),
        "output": Param(str(OUTPUT), type="string", description="The folder of the Parquet files."),
    },
    tags=["airflow-broadway", "demo", "rabbitmq"],
    doc_md=__doc__,
) as dag:
    table = {"sink": {"path": "{{ params.output }}/flights"}}
    RabbitMQFlights(batchers={"delayed": table, "on_time": table}).task_group(
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
