"""The Airflow DAG of the killed backfills."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param
from kept_pipeline import Kept  # type: ignore[import-not-found]

with DAG(
    "kept",
    schedule=None,
    max_active_runs=1,
    params={**Kept.params(), "rows": Param("", type="string"), "refuse": Param("", type="string")},
):
    Kept(context={"rows": "{{ params.rows }}", "refuse": "{{ params.refuse }}"}).task_group(
        # A killed task is tried again at once, as often as it takes.
        default_args={"retries": 60, "retry_delay": timedelta(seconds=1)},
        ack={"fail_when": "never"},
    )
