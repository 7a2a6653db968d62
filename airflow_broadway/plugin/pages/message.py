"""Message search: by id, or, with permission to see payloads, by text in the payload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from airflow_broadway.plugin.access import READS_RUNS, MayEdit, note
from airflow_broadway.plugin.declared import tasks_of_run
from airflow_broadway.plugin.reading import READING, staged_runs
from airflow_broadway.plugin.render import show_page
from airflow_broadway.runs.reading.message import (
    Story,
    TextHits,
    find_message,
    ids_with_text,
    other_runs,
)

router = APIRouter(prefix="/dags/{dag_id}/runs/{run_id}", dependencies=[READS_RUNS])


@router.get("/message")
async def find(
    request: Request,
    dag_id: str,
    run_id: str,
    may_edit: MayEdit,
    user: GetUserDep,
    q: str = "",
    everywhere: bool = False,
) -> HTMLResponse:
    """Shows the history of a message; payloads need permission to edit the Dag's runs."""
    search = q.strip()
    if search and may_edit:
        details = {"q": search, "everywhere": everywhere}
        event = "broadway_message_show"
        await run_in_threadpool(note, user, dag_id, event, details, run_id=run_id)
    variables: dict[str, Any] = {"dag_id": dag_id, "run_id": run_id, "search": search}
    variables |= {"everywhere": everywhere, "may_edit": may_edit}
    variables |= await READING(
        _search, dag_id, run_id, search, everywhere=everywhere, with_payload=may_edit
    )
    return await show_page(request, "message.html", **variables)


def _search(
    dag_id: str, run_id: str, search: str, *, everywhere: bool, with_payload: bool
) -> dict[str, Any]:
    """Returns the message's stories, or else the messages that contain the text."""
    runs = staged_runs(dag_id, run_id, tasks_of_run(dag_id, run_id))
    runs_searched = list(runs)
    if everywhere and search:
        runs_searched += (other for run in runs for other in other_runs(run.store, run))
    stories: Sequence[Story] = ()
    if search:
        stories = find_message(runs_searched, search, with_payload=with_payload)
    hits: list[TextHits] = []
    if search and not stories and with_payload:
        hits = [ids_with_text(run, search, share=1 / len(runs)) for run in runs]
    return {
        "stories": stories,
        "hits": hits,
        "runs": len(runs_searched),
        "pipelines": sorted({run.pipeline for run in runs}),
    }
