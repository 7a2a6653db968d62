"""The demo's DAG: one run drains the queue of flights, however many there are.

`make demo` fills the queue and runs it; with `make up`, trigger it in the UI.
"""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, Param

from flights_pipeline import Flights

OUTPUT = Path(__file__).resolve().parent.parent / "build" / "demo" / "output"

with DAG(
    "flights",
    # Or "*/5 * * * *": each run receives the messages that have arrived since the previous one.
    schedule=None,
    catchup=False,
    # A second concurrent run would only share the messages of the first.
    max_active_runs=1,
    # The source and the budgets of a run, for the Trigger form, and a param of this DAG.
    params={
        **Flights.params(),
        "output": Param(str(OUTPUT), type="string", description="The folder of the Parquet files."),
    },
    tags=["airflow-broadway", "demo"],
    doc_md=__doc__,
) as dag:
    table = {"sink": {"path": "{{ params.output }}/flights"}}
    Flights(batchers={"delayed": table, "on_time": table}).task_group(
        # For a laptop: no web server, and a JVM that is tuned to start fast.
        spark={
            "conf": {
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.sql.shuffle.partitions": "2",
                "spark.ui.enabled": "false",
            },
        },
    )
