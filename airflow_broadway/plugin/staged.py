"""The staging roots as the API server sees them, and the staged runs of a Dag run in them."""

from __future__ import annotations

from typing import Final

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.core.errors import RequestRefused, StagingError
from airflow_broadway.plugin.run_tasks import RunTasks
from airflow_broadway.runs.reading.runs import iter_runs
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store

#: What people can do about a folder that is not there.
_ADVICE: Final = (
    " on the API server: either no run has begun yet, which makes it, or the workers have it"
    " elsewhere; then set `[broadway] staging`, here and there, to a place that all of them see"
)


def seen_root(root: str | None) -> Store:
    """A staging root to look at; ``None``: that of Airflow's configuration.

    :raises StagingError: If it cannot be opened, or is a folder that is not there.
    """
    return open_existing_store(root, advice=_ADVICE)


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
            store = seen_root(root)
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
