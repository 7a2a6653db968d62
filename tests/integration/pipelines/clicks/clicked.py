"""Dags for tests of clicks in Airflow; the queue and the folder of a run are params."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param
from clicked_pipeline import (  # type: ignore[import-not-found]
    Clicked,
    ClickedSpark,
    RabbitClicked,
    RabbitClickedLapse,
    RabbitClickedSpark,
)

SPARK = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
}

SHAPES: tuple[tuple[str, bool, dict[str, Any]], ...] = (
    ("clicked", False, {}),
    ("clicked_deferred", False, {"ack": {"deferrable": True}}),
    ("clicked_spark", True, {"spark": {"conf": SPARK}}),
    ("clicked_no_spark", True, {"spark": {"conn_id": "nowhere"}}),
)
KINDS = (
    *((name, ClickedSpark if spark else Clicked, arguments) for name, spark, arguments in SHAPES),
    *(
        (f"rabbitmq_{name}", RabbitClickedSpark if spark else RabbitClicked, arguments)
        for name, spark, arguments in SHAPES
    ),
    (
        "rabbitmq_clicked_lapse",
        RabbitClickedLapse,
        {"spark": {"conf": SPARK}, "ack": {"poke_interval": 4.0}, "process": {"max_seconds": 30.0}},
    ),
)

for dag_id, pipeline, arguments in KINDS:
    with DAG(
        dag_id,
        schedule=None,
        max_active_runs=16,
        params={"folder": Param("", type="string"), "queue": Param("", type="string")},
    ):
        pipeline(
            producer={"queue": "{{ params.queue }}"}, context={"folder": "{{ params.folder }}"}
        ).task_group(
            default_args={"retries": 0, "retry_delay": timedelta(seconds=1)},
            # A late scheduler fails a sensor that it has rescheduled (apache/airflow#71172).
            **{"ack": {"hold_failed": 600.0, "poke_interval": 4.0, "retries": 1}, **arguments},
        )
