"""The DAGs of ``make bench``: the demo's pipeline, and bare DAGs for comparison."""

from __future__ import annotations

import os
from pathlib import Path

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, chain

from flights_pipeline import Flights
from tests.benchmarks.pipelines import SPARK


def nothing() -> None:
    """Does nothing."""


with DAG("bench_flights", schedule=None, params=Flights.params()) as dag:
    table = {"sink": {"path": os.environ.get("BENCH_OUTPUT", "/tmp/bench")}}
    Flights(batchers={"delayed": table, "on_time": table}).task_group(
        spark={"conf": SPARK}, ack={"mode": "poke", "poke_interval": 1.0}
    )


def bare(dag_id: str, *, spark: bool) -> DAG:
    """Creates a DAG with as many tasks as the pipeline, which do nothing, and a small Spark job."""
    with DAG(dag_id, schedule=None) as made:
        process = [PythonOperator(task_id=f"process_{n}", python_callable=nothing) for n in (0, 1)]
        batch = [PythonOperator(task_id=f"batch_{n}", python_callable=nothing) for n in (0, 1)]
        last = (
            SparkSubmitOperator(
                task_id="spark",
                application=str(Path(__file__).parent / "trivial_job.py"),
                conf=SPARK,
            )
            if spark
            else PythonOperator(task_id="spark", python_callable=nothing)
        )
        chain(process, batch, last)
        PythonOperator(task_id="ack", python_callable=nothing)
    return made


bench_bare = bare("bench_bare", spark=False)
bench_bare_spark = bare("bench_bare_spark", spark=True)
