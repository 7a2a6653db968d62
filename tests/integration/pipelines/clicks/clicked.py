"""Airflow DAGs to click at; the queue and the folder of a run are params."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param
from clicked_pipeline import Clicked, ClickedSpark  # type: ignore[import-not-found]

SPARK = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
}

for dag_id, pipeline, given in (
    ("clicked", Clicked, {}),
    ("clicked_deferred", Clicked, {"ack": {"deferrable": True}}),
    ("clicked_spark", ClickedSpark, {"spark": {"conf": SPARK}}),
    ("clicked_no_spark", ClickedSpark, {"spark": {"conn_id": "nowhere"}}),
):
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
            **{"ack": {"hold_failed": 600.0, "poke_interval": 4.0}, **given},
        )
