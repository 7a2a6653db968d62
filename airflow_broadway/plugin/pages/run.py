"""A run's page: what became of every message."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.text import many
from airflow_broadway.plugin.access import READS_RUNS, MayEdit
from airflow_broadway.plugin.picture import TONES, Picture, picture_of, word_for, word_of
from airflow_broadway.plugin.reading import READING
from airflow_broadway.plugin.render import page
from airflow_broadway.plugin.run_tasks import PipelineTasks, RunTasks, tasks_of_run
from airflow_broadway.plugin.staged import staged_runs
from airflow_broadway.runs.reading.batches import BatchPage, page_of_batches
from airflow_broadway.runs.reading.overview import Overview, Receipt, overview_of
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)

router = APIRouter(prefix="/dags/{dag_id}/runs/{run_id}", dependencies=[READS_RUNS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be seen of which pipeline's batches."""

    pipeline: str = ""
    page: int = 1
    sort: str = "plan"
    desc: bool = False
    state: str = "all"
    batcher: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One pipeline of a run.

    :param overview: ``None`` before it has received anything.
    :param tasks: ``None`` if Airflow does not know them.
    :param standing: How the run is, in a few words, and their tone.
    """

    name: str
    overview: Overview | None
    tasks: PipelineTasks | None
    picture: Picture
    standing: tuple[str, str]
    batches: BatchPage | None


@router.get("")
async def show(
    request: Request, dag_id: str, run_id: str, asked: Annotated[Asked, Depends()], edits: MayEdit
) -> HTMLResponse:
    """All pipelines of a run, one section each."""
    facts = await _facts(request, dag_id, run_id, asked, edits=edits)
    status = HTTPStatus.SERVICE_UNAVAILABLE if facts["unread"] else HTTPStatus.OK
    return await run_in_threadpool(page, request, "run.html", status=status, **facts)


@router.get("/live")
async def show_live(
    request: Request, dag_id: str, run_id: str, asked: Annotated[Asked, Depends()], edits: MayEdit
) -> HTMLResponse:
    """The same as a part of a page, which takes the place of what it showed before."""
    facts = await _facts(request, dag_id, run_id, asked, edits=edits)
    return await run_in_threadpool(page, request, "_run.html", **facts)


async def _facts(
    request: Request, dag_id: str, run_id: str, asked: Asked, *, edits: bool
) -> dict[str, Any]:
    """What is shown of a run."""
    known = await run_in_threadpool(tasks_of_run, dag_id, run_id)
    unread = ""
    try:
        sections = await READING(_sections, dag_id, run_id, known, asked)
    except StagingError as error:
        if known.state is None:
            raise
        # What Airflow knows is shown all the same; and staging may be there, or answer, soon.
        log.warning("%s: %s", request.url.path, error)
        sections, unread = [_unread_section(each) for each in known.pipelines], str(error)
    return {
        "unread": unread,
        "dag_id": dag_id,
        "run_id": run_id,
        "going_on": known.going_on,
        "sections": sections,
        "query": request.url.query,
        "classes": CLASSES,
        "tones": TONES,
        "word_for": word_for,
        "word_of": word_of,
        "receipt_word": receipt_word,
        "may_edit": edits,
    }


# -- what is shown ---------------------------------------------------------------------------------


def _sections(dag_id: str, run_id: str, known: RunTasks, asked: Asked) -> list[Section]:
    """The pipelines of a run: those that Airflow knows, and those that staging has besides."""
    staged = {run.pipeline: run for run in staged_runs(dag_id, run_id, known)}
    sections = []
    for tasks in known.pipelines:
        found = _run_of(tasks, staged)
        if found is not None:
            del staged[found.pipeline]
        sections.append(_section(found, tasks, known, asked))
    return [*sections, *(_section(run, None, known, asked) for run in staged.values())]


def _run_of(tasks: PipelineTasks, staged: dict[str, StagedRun]) -> StagedRun | None:
    """The staged run of a pipeline: by its name, or by the tasks that received for it."""
    if tasks.name in staged:
        return staged[tasks.name]
    pulling = {each.task_id for each in tasks.of_kind("process", "run")}
    for run in staged.values():
        if pulling & {each.task_id for each in run.generations()}:
            return run
    return None


def _section(
    run: StagedRun | None, tasks: PipelineTasks | None, known: RunTasks, asked: Asked
) -> Section:
    recorded = None if run is None else Recorded(run)
    overview = None if run is None else overview_of(run, recorded=recorded)
    name = run.pipeline if run is not None else tasks.name if tasks is not None else ""
    wanted = asked if asked.pipeline in ("", name) else Asked()
    batches = None
    if run is not None:
        batches = page_of_batches(
            run,
            page=wanted.page,
            sort=wanted.sort,
            descending=wanted.desc,
            state=wanted.state,
            batcher=wanted.batcher,
            recorded=recorded,
        )
    return Section(
        name=name,
        overview=overview,
        tasks=tasks,
        picture=picture_of(overview, tasks),
        standing=standing_of(overview, known, tasks),
        batches=batches,
    )


def _unread_section(tasks: PipelineTasks) -> Section:
    """What Airflow alone knows of a pipeline."""
    return Section(
        name=tasks.name,
        overview=None,
        tasks=tasks,
        picture=picture_of(None, tasks),
        standing=("cannot be read", "warn"),
        batches=None,
    )


def standing_of(
    overview: Overview | None, known: RunTasks, tasks: PipelineTasks | None = None
) -> tuple[str, str]:
    """How a run is, in a few words, and their tone."""
    if overview is None:
        return ("nothing received yet", "") if known.going_on else ("received nothing", "")
    leases = [each.lease for each in overview.receipts if each.lease is not None]
    if overview.summary.trouble or any(lease.remaining < 0 for lease in leases):
        return "needs a look", "bad"
    if overview.look:
        return "dry run", "good"
    if overview.settled:
        return ("balanced", "good") if overview.balanced else ("does not balance", "bad")
    if not known.going_on:
        return "not settled", "warn"
    if any(_is_receiving(each, tasks, known.going_on) for each in overview.receipts):
        return "receives", "busy"
    if any(each.done < each.batches for each in overview.flows):
        return "handles batches", "busy"
    return "waits for outcomes", "busy"


def receipt_word(receipt: Receipt, section: Section, going_on: bool) -> tuple[str, str]:
    """How far an execution of a process task is, and the tone of that."""
    if not receipt.live:
        words = {
            "published": ("published; waits for outcomes", "busy"),
            "settling": ("is being settled", "busy"),
            "settled": ("settled", "good"),
        }
        account = receipt.account or {}
        if receipt.state == "settled" and account.get("released"):
            gave_back = many(account["released"], "message")
            return f"dead; {gave_back} went back", "warn"
        if receipt.state == "settled" and receipt.received is None:
            return "dead before it published anything", "warn"
        return words[receipt.state]
    if _is_receiving(receipt, section.tasks, going_on):
        return "receives", "busy"
    return "died before it published anything; its messages go back", "warn"


def _is_receiving(receipt: Receipt, tasks: PipelineTasks | None, going_on: bool) -> bool:
    """Whether an execution that has published nothing is at work, as Airflow knows it."""
    if not receipt.live:
        return False
    here = [
        each
        for task in (tasks.of_kind("process", "run") if tasks else ())
        if task.task_id == receipt.task_id
        for each in task.instances
        if each.map_index == receipt.map_index and each.try_number == receipt.try_number
    ]
    return going_on and (not here or here[0].state in ("running", "restarting"))
