"""The demo's DAG with Google Cloud Pub/Sub instead of the embedded queue.

The Airflow connection `google_cloud_default` has the credentials and the project; `python -m
scripts.load_pubsub` creates the topic and the subscription `flights` and those of dead letters, and
fills the topic.  See `docs/pubsub.md`.
"""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, Param
from pubsub_flights_pipeline import PubSubFlights

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "build" / "demo" / "pubsub"

with DAG(
    "pubsub_flights",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params={
        **PubSubFlights.params(),
        "output": Param(str(OUTPUT), type="string", description="The folder of the Parquet files."),
    },
    tags=["airflow-broadway", "demo", "pubsub"],
    doc_md=__doc__,
) as dag:
    table = {"sink": {"path": "{{ params.output }}/flights"}}
    PubSubFlights(batchers={"delayed": table, "on_time": table}).task_group(
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
