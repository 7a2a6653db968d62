"""The DAG of the tests that need no Spark."""

from __future__ import annotations

from airflow.sdk import DAG, Param
from letters_pipeline import Letters  # type: ignore[import-not-found]

with DAG(
    "letters",
    schedule=None,
    max_active_runs=1,
    params={**Letters.params(), "mended": Param(False, type="boolean")},
    tags=["<script>window.owned = 'tag'</script>"],
):
    Letters(context={"mended": "{{ params.mended }}"}).task_group(default_args={"retries": 0})
