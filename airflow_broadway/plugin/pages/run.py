"""A run's page: what became of every message."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from airflow_broadway.adapters.staging import open_existing_store
from airflow_broadway.plugin.access import READS_RUNS
from airflow_broadway.plugin.render import page
from airflow_broadway.runs.inspect import iter_runs, show_run

__all__ = ["router"]

router = APIRouter(prefix="/dags/{dag_id}/runs/{run_id}", dependencies=[READS_RUNS])


@router.get("")
def show(request: Request, dag_id: str, run_id: str) -> HTMLResponse:
    """All pipelines of a run, one section each."""
    store = open_existing_store(None)
    runs = [show_run(run) for run in iter_runs(store, dag_id=dag_id, run_id=run_id)]
    return page(request, "run.html", dag_id=dag_id, run_id=run_id, runs=runs)
