"""The demo's DAG with Google Cloud Pub/Sub in the embedded queue's place.

The Airflow connection `google_cloud_default` says who asks, and in which project; `python -m
scripts.load_pubsub` makes the topic and the subscription `flights`, those of dead letters, and
fills the first.  See `docs/pubsub.md`.
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
        "output": Param(str(OUTPUT), type="string", description="Where the Parquet files go."),
    },
    tags=["airflow-broadway", "demo", "pubsub"],
    doc_md=__doc__,
) as dag:
    table = {"sink": {"path": "{{ params.output }}/flights"}}
    PubSubFlights(batchers={"delayed": table, "on_time": table}).task_group(
        spark={
            # The pipeline's own module goes to Spark by itself; the one it builds on is named.
            "py_files": str(HERE / "flights_pipeline.py"),
            "conf": {
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.sql.shuffle.partitions": "2",
                "spark.ui.enabled": "false",
            },
        },
    )
