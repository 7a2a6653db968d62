"""The Airflow DAG of the backfills whose tasks are killed."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param
from archived_pipeline import ArchivedPipeline  # type: ignore[import-not-found]

with DAG(
    "archived",
    schedule=None,
    max_active_runs=1,
    params={
        **ArchivedPipeline.params(),
        "rows": Param("", type="string"),
        "refuse": Param("", type="string"),
    },
):
    ArchivedPipeline(
        context={"rows": "{{ params.rows }}", "refuse": "{{ params.refuse }}"}
    ).task_group(
        # A killed task is retried after a second, as often as necessary.
        default_args={"retries": 60, "retry_delay": timedelta(seconds=1)},
        ack={"fail_when": "never"},
    )
