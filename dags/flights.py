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
    # Or "*/5 * * * *": each run takes what has arrived since the one before.
    schedule=None,
    catchup=False,
    # One run at a time drains the queue; a second would only wait for it.
    max_active_runs=1,
    # The budget of a run, which the UI's trigger form asks for, and a parameter of our own.
    params={
        **Flights.params(),
        "output": Param(str(OUTPUT), type="string", description="Where the Parquet files go."),
    },
    tags=["airflow-broadway", "demo"],
    doc_md=__doc__,
) as dag:
    table = {"sink": {"path": "{{ params.output }}/flights"}}
    Flights(batchers={"delayed": table, "on_time": table}).task_group(
        # A laptop's Spark: no web server, and a JVM that starts fast rather than runs long.
        spark={
            "conf": {
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.sql.shuffle.partitions": "2",
                "spark.ui.enabled": "false",
            },
        },
    )
