"""A run's reports as Markdown, one for each pipeline, served as plain text."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from airflow_broadway.core.custody.run_summary import markdown_of
from airflow_broadway.plugin.access import READS_RUNS
from airflow_broadway.plugin.reading import READING
from airflow_broadway.plugin.run_tasks import tasks_of_run
from airflow_broadway.plugin.staged import staged_runs
from airflow_broadway.runs.account import kept_report

router = APIRouter(prefix="/dags/{dag_id}/runs/{run_id}", dependencies=[READS_RUNS])


@router.get("/report")
async def show(dag_id: str, run_id: str) -> PlainTextResponse:
    """Returns the reports of a run."""
    text = await READING(_render_reports, dag_id, run_id)
    return PlainTextResponse(text or "This run has no report yet: its task ack writes it.\n")


def _render_reports(dag_id: str, run_id: str) -> str:
    runs = staged_runs(dag_id, run_id, tasks_of_run(dag_id, run_id))
    reports = [report for report in map(kept_report, runs) if report is not None]
    return "\n".join(map(markdown_of, reports))
