"""The staged runs of a Dag run: in the staging root of each of its pipelines."""

from __future__ import annotations

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.core.errors import RequestRefused, StagingError
from airflow_broadway.plugin.run_tasks import RunTasks
from airflow_broadway.runs.inspect import iter_runs
from airflow_broadway.staging.run_folder import StagedRun

__all__ = ["staged_runs"]


def staged_runs(dag_id: str, run_id: str, known: RunTasks) -> list[StagedRun]:
    """What staging has of a run: one for each pipeline that received, at most.

    :param known: The run as Airflow knows it; a pipeline's tasks may have a root of their own.
    :raises RequestRefused: If neither Airflow nor staging knows the run.
    :raises StagingError: If a root is gone, or cannot be read.
    """
    roots = {each.staging for each in known.pipelines} or {None}
    found: dict[str, StagedRun] = {}
    for root in sorted(roots, key=str):
        try:
            store = open_existing_store(root)
        except StagingError:
            if known.pipelines or known.state is None:
                raise
            continue  # a Dag that has nothing to do with this needs no staging root
        for run in iter_runs(store, dag_id=dag_id, run_id=run_id):
            found.setdefault(run.pipeline, run)
    if not found and known.state is None:
        raise RequestRefused(
            f"Neither Airflow nor the staging folder knows a run {run_id} of the Dag {dag_id}."
        )
    return list(found.values())
