"""The page of a run: the outcome of every message; and its reports as Markdown."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, PlainTextResponse

from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.custody.run_summary import markdown_of
from airflow_broadway.core.errors import StagingError
from airflow_broadway.core.text import pluralize
from airflow_broadway.plugin.access import READS_RUNS, MayEdit
from airflow_broadway.plugin.declared import PipelineTasks, RunTasks, tasks_of_run
from airflow_broadway.plugin.picture import TONES, Picture, picture_of, word_for
from airflow_broadway.plugin.reading import READING, staged_runs
from airflow_broadway.plugin.render import show_page
from airflow_broadway.runs.account import kept_report
from airflow_broadway.runs.reading.batches import BatchPage, page_of_batches
from airflow_broadway.runs.reading.overview import Overview, Receipt, overview_of
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun

log = logging.getLogger(__name__)

router = APIRouter(prefix="/dags/{dag_id}/runs/{run_id}", dependencies=[READS_RUNS])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQuery:
    """Filter, order and page of one pipeline's batches."""

    pipeline: str = ""
    page: int = 1
    sort: str = "plan"
    desc: bool = False
    state: str = "all"
    batcher: str = ""


BatchQueryDep = Annotated[BatchQuery, Depends()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One pipeline of a run.

    :param overview: ``None`` before it has received anything.
    :param tasks: ``None`` if Airflow does not have them.
    :param standing: The label and tone of the run's status.
    """

    name: str
    overview: Overview | None
    tasks: PipelineTasks | None
    picture: Picture
    standing: tuple[str, str]
    batches: BatchPage | None


@router.get("")
async def show(
    request: Request, dag_id: str, run_id: str, query: BatchQueryDep, edits: MayEdit
) -> HTMLResponse:
    """Shows all pipelines of a run, one section each."""
    variables = await _load_variables(request, dag_id, run_id, query)
    status = HTTPStatus.SERVICE_UNAVAILABLE if variables["unread"] else HTTPStatus.OK
    return await show_page(request, "run.html", status=status, may_edit=edits, **variables)


@router.get("/live")
async def show_live(
    request: Request, dag_id: str, run_id: str, query: BatchQueryDep
) -> HTMLResponse:
    """Returns the sections only; the page's script replaces the previous ones."""
    variables = await _load_variables(request, dag_id, run_id, query)
    return await show_page(request, "_run.html", **variables)


async def _load_variables(
    request: Request, dag_id: str, run_id: str, query: BatchQuery
) -> dict[str, Any]:
    """Returns the template variables of a run."""
    known = await run_in_threadpool(tasks_of_run, dag_id, run_id)
    unread = ""
    try:
        sections = await READING(_build_sections, dag_id, run_id, known, query)
    except StagingError as error:
        if known.state is None:
            raise
        # Airflow's data are shown anyway; staging may recover.
        log.warning("%s: %s", request.url.path, error)
        sections = [_build_section(None, tasks, known, query) for tasks in known.pipelines]
        sections = [replace(one, standing=("cannot be read", "warn")) for one in sections]
        unread = str(error)
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
        "receipt_word": receipt_word,
    }


@router.get("/report")
async def show_report(dag_id: str, run_id: str) -> PlainTextResponse:
    """Returns the reports of a run, one for each pipeline, as Markdown in plain text."""
    text = await READING(_render_reports, dag_id, run_id)
    return PlainTextResponse(text or "This run has no report yet: its task ack writes it.\n")


def _render_reports(dag_id: str, run_id: str) -> str:
    runs = staged_runs(dag_id, run_id, tasks_of_run(dag_id, run_id))
    reports = [report for report in map(kept_report, runs) if report is not None]
    return "\n".join(map(markdown_of, reports))


# -- sections --------------------------------------------------------------------------------------


def _build_sections(dag_id: str, run_id: str, known: RunTasks, query: BatchQuery) -> list[Section]:
    """Returns the pipelines of a run: those in Airflow, then others found in staging only."""
    staged = {run.pipeline: run for run in staged_runs(dag_id, run_id, known)}
    sections = []
    for tasks in known.pipelines:
        run = _find_run(tasks, staged)
        if run is not None:
            del staged[run.pipeline]
        sections.append(_build_section(run, tasks, known, query))
    return [*sections, *(_build_section(run, None, known, query) for run in staged.values())]


def _find_run(tasks: PipelineTasks, staged: dict[str, StagedRun]) -> StagedRun | None:
    """Returns the staged run of a pipeline, by its name or by its receiving tasks."""
    if tasks.name in staged:
        return staged[tasks.name]
    receiving = {task.task_id for task in tasks.of_kind("process", "run")}
    for run in staged.values():
        if receiving & {generation.task_id for generation in run.generations()}:
            return run
    return None


def _build_section(
    run: StagedRun | None, tasks: PipelineTasks | None, known: RunTasks, query: BatchQuery
) -> Section:
    recorded = None if run is None else Recorded(run)
    overview = None if run is None else overview_of(run, recorded=recorded)
    name = run.pipeline if run is not None else tasks.name if tasks is not None else ""
    options = asdict(query if query.pipeline in ("", name) else BatchQuery())
    options["descending"] = options.pop("desc")
    del options["pipeline"]
    batches = None if run is None else page_of_batches(run, recorded=recorded, **options)
    return Section(
        name=name,
        overview=overview,
        tasks=tasks,
        picture=picture_of(overview, tasks),
        standing=standing_of(overview, known, tasks),
        batches=batches,
    )


def standing_of(
    overview: Overview | None, known: RunTasks, tasks: PipelineTasks | None
) -> tuple[str, str]:
    """Returns the label and tone of a run's status."""
    if overview is None:
        return ("nothing received yet", "") if known.going_on else ("received nothing", "")
    leases = [receipt.lease for receipt in overview.receipts if receipt.lease is not None]
    if overview.summary.trouble or any(lease.remaining < 0 for lease in leases):
        return "needs a look", "bad"
    if overview.look:
        return "dry run", "good"
    if overview.settled:
        return ("balanced", "good") if overview.balanced else ("does not balance", "bad")
    if not known.going_on:
        return "not settled", "warn"
    if any(_is_receiving(receipt, tasks, known.going_on) for receipt in overview.receipts):
        return "receives", "busy"
    if any(flow.done < flow.batches for flow in overview.flows):
        return "handles batches", "busy"
    return "waits for outcomes", "busy"


def receipt_word(receipt: Receipt, section: Section, going_on: bool) -> tuple[str, str]:
    """Returns the label and tone of an execution of a process task."""
    if _is_receiving(receipt, section.tasks, going_on):
        return "receives", "busy"
    if receipt.live:
        return "died before it published anything; its messages are released", "warn"
    released = (receipt.account or {}).get("released")
    if receipt.state == "settled" and released:
        return f"dead; {pluralize(released, 'message')} released", "warn"
    if receipt.state == "settled" and receipt.received is None:
        return "dead before it published anything", "warn"
    return _RECEIPT_WORDS[receipt.state]


_RECEIPT_WORDS: Final = {
    "published": ("published; waits for outcomes", "busy"),
    "settling": ("is being settled", "busy"),
    "settled": ("settled", "good"),
}


def _is_receiving(receipt: Receipt, tasks: PipelineTasks | None, going_on: bool) -> bool:
    """Returns whether an unpublished execution is still running, according to Airflow."""
    states = [
        instance.state
        for task in (tasks.of_kind("process", "run") if tasks else ())
        if task.task_id == receipt.task_id
        for instance in task.instances
        if instance.map_index == receipt.map_index and instance.try_number == receipt.try_number
    ]
    at_work = not states or states[0] in ("running", "restarting")
    return receipt.live and going_on and at_work
