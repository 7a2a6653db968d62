"""A Dag of Airflow whose tasks link to all that there is: RabbitMQ, Spark's UI, its history."""

from __future__ import annotations

from pathlib import Path

from linked_pipeline import Linked  # type: ignore[import-not-found]

FOLDER = Path(__file__).resolve().parent.parent

Linked(context={"go": str(FOLDER / "go")}).dag(
    "links",
    default_args={"retries": 0},
    spark={
        "conf": {
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.ui.enabled": "true",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file://{FOLDER}/events",
        }
    },
)
