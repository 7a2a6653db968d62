"""The demo's DAG with a Delta Lake table instead of a folder.

`make demo ARGS="--sink delta"` creates the table and runs it.  See `docs/sink-tables.md`.
"""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, Param
from delta_flights_pipeline import DeltaFlights

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
#: Delta Lake's jars for Spark; with access to Maven Central use `spark.jars.packages`.
JARS = ",".join(map(str, sorted((BUILD / "tables").glob("delta-*.jar"))))

with DAG(
    "delta_flights",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params={
        **DeltaFlights.params(),
        "output": Param(
            str(BUILD / "demo" / "output"), type="string", description="The folder of the table."
        ),
    },
    tags=["airflow-broadway", "demo", "delta"],
    doc_md=__doc__,
) as dag:
    table = {"sink": {"path": "{{ params.output }}/flights"}}
    DeltaFlights(batchers={"delayed": table, "on_time": table}).task_group(
        spark={
            # The pipeline's module is shipped automatically, that of its base class is not.
            "py_files": str(HERE / "flights_pipeline.py"),
            "jars": JARS or None,
            "conf": {
                "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
                "spark.sql.catalog.spark_catalog": (
                    "org.apache.spark.sql.delta.catalog.DeltaCatalog"
                ),
                "spark.databricks.delta.snapshotPartitions": "2",
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.sql.shuffle.partitions": "2",
                "spark.ui.enabled": "false",
            },
        },
    )
