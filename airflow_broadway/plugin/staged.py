"""Access to staging roots from the API server, and the staged runs of a Dag run."""

from __future__ import annotations

from typing import Final

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.core.errors import RequestRefused, StagingError
from airflow_broadway.plugin.run_tasks import RunTasks
from airflow_broadway.runs.reading.runs import iter_runs
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store

#: The way out for a missing folder.
_ADVICE: Final = (
    " on the API server: either no run has begun yet, which makes it, or the workers have it"
    " elsewhere; then set `[broadway] staging`, here and there, to a place that all of them see"
)


def seen_root(root: str | None) -> Store:
    """Opens a staging root for reading; ``None``: that of Airflow's configuration.

    :raises StagingError: If it cannot be opened, or the folder does not exist.
    """
    return open_existing_store(root, advice=_ADVICE)


def staged_runs(dag_id: str, run_id: str, known: RunTasks) -> list[StagedRun]:
    """Returns the staged runs of a Dag run: at most one for each pipeline.

    :param known: The run in Airflow; a pipeline's tasks may have their own staging root.
    :raises RequestRefused: If neither Airflow nor staging has the run.
    :raises StagingError: If a root does not exist or cannot be read.
    """
    roots = {pipeline.staging for pipeline in known.pipelines} or {None}
    runs: dict[str, StagedRun] = {}
    for root in sorted(roots, key=str):
        try:
            store = seen_root(root)
        except StagingError:
            if known.pipelines or known.state is None:
                raise
            continue  # a Dag without pipelines needs no staging root
        for run in iter_runs(store, dag_id=dag_id, run_id=run_id):
            runs.setdefault(run.pipeline, run)
    if not runs and known.state is None:
        raise RequestRefused(
            f"Neither Airflow nor the staging folder has a run {run_id} of the Dag {dag_id}."
        )
    return list(runs.values())
