"""The DAGs of the tests that need no Spark."""

from __future__ import annotations

from airflow.sdk import DAG, Param
from letters_pipeline import Letters  # type: ignore[import-not-found]

EVIL = "<script>window.owned = 'DAG'</script>"

for dag_id in ("letters", "secret"):
    with DAG(
        dag_id,
        schedule=None,
        max_active_runs=1,
        description=EVIL,
        tags=[EVIL],
        params={**Letters.params(), "mended": Param(False, type="boolean")},
    ):
        Letters(
            # Each DAG has its own queue.
            producer={"queue": dag_id},
            context={"mended": "{{ params.mended }}", "evil": EVIL},
        ).task_group(default_args={"retries": 0})
