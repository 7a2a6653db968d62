"""The Airflow DAGs of the fault runs: ``killed_<broker>`` for each broker."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param
from killed_pipeline import PIPELINES  # type: ignore[import-not-found]

for broker, pipeline in PIPELINES.items():
    with DAG(
        f"killed_{broker}",
        schedule=None,
        max_active_runs=1,
        params={**pipeline.params(), "handled": Param("", type="string")},
    ):
        pipeline(context={"handled": "{{ params.handled }}"}).task_group(
            # A killed task is retried after a second, as often as necessary.
            default_args={"retries": 60, "retry_delay": timedelta(seconds=1)},
            # The last runs only have messages that fail every time.
            ack={"fail_when": "never"},
            spark={
                "conf": {
                    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                    "spark.sql.shuffle.partitions": "2",
                    "spark.ui.enabled": "false",
                }
            },
        )
