"""The demo's DAG with Amazon SQS instead of the embedded queue.

The Airflow connection `aws_default` has the credentials, the region, and the endpoint if it is not
AWS's; `python -m scripts.load_sqs` creates the queue `flights` and fills it.  See `docs/sqs.md`.
"""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, Param
from sqs_flights_pipeline import SqsFlights

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "build" / "demo" / "sqs"

with DAG(
    "sqs_flights",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params={
        **SqsFlights.params(),
        "output": Param(str(OUTPUT), type="string", description="The folder of the Parquet files."),
    },
    tags=["airflow-broadway", "demo", "sqs"],
    doc_md=__doc__,
) as dag:
    table = {"sink": {"path": "{{ params.output }}/flights"}}
    SqsFlights(batchers={"delayed": table, "on_time": table}).task_group(
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
