"""Where is my message: by its id, or, for those who may see payloads, by a text in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from airflow_broadway.plugin.access import READS_RUNS, GetUserDep, MayEdit
from airflow_broadway.plugin.audit import note
from airflow_broadway.plugin.reading import READING
from airflow_broadway.plugin.render import page
from airflow_broadway.plugin.run_tasks import tasks_of_run
from airflow_broadway.plugin.staged import staged_runs
from airflow_broadway.runs.reading.message import (
    Story,
    TextHits,
    find_message,
    ids_with_text,
    other_runs,
)
from airflow_broadway.staging.run_folder import StagedRun

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
    """The whole story of a message; payloads are for those who may edit the Dag's runs."""
    asked = q.strip()
    if asked and may_edit:
        about = {"q": asked, "everywhere": everywhere}
        event = "broadway_message_show"
        await run_in_threadpool(note, user, dag_id, event, about, run_id=run_id)
    found = await READING(
        _found, dag_id, run_id, asked, everywhere=everywhere, with_payload=may_edit
    )
    return await run_in_threadpool(
        page,
        request,
        "message.html",
        dag_id=dag_id,
        run_id=run_id,
        asked=asked,
        everywhere=everywhere,
        may_edit=may_edit,
        **found,
    )


def _found(
    dag_id: str, run_id: str, asked: str, *, everywhere: bool, with_payload: bool
) -> dict[str, Any]:
    """The message's stories, or else those that have the text; and in how many runs was looked."""
    runs = staged_runs(dag_id, run_id, tasks_of_run(dag_id, run_id))
    looked = [*runs, *_others(runs)] if everywhere and asked else runs
    stories: Sequence[Story] = ()
    if asked:
        stories = find_message(looked, asked, with_payload=with_payload)
    hits: list[TextHits] = []
    if asked and not stories and with_payload:
        hits = [ids_with_text(run, asked, share=1 / len(runs)) for run in runs]
    return {
        "stories": stories,
        "hits": hits,
        "runs": len(looked),
        "pipelines": sorted({run.pipeline for run in runs}),
    }


def _others(runs: Sequence[StagedRun]) -> list[StagedRun]:
    return [other for run in runs for other in other_runs(run.store, run)]
