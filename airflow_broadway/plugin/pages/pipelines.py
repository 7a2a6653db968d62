"""The pipelines of every Dag that the user may read, those with trouble first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from airflow_broadway.plugin.access import WITHHELD, may_edit, readable_dags
from airflow_broadway.plugin.charts import bars
from airflow_broadway.plugin.children import asks_brokers
from airflow_broadway.plugin.declared import declared_pipelines
from airflow_broadway.plugin.depths import DEPTHS
from airflow_broadway.plugin.reading import READING, seen_root
from airflow_broadway.plugin.render import count, page, seconds
from airflow_broadway.plugin.standings import SHOWN, Page, Standing, page_of
from airflow_broadway.runs.reading.history import MANY_FAILED

router = APIRouter()

Number = Annotated[int, Query(alias="page", ge=1, le=1_000_000)]
Text = Annotated[str, Query(max_length=250)]

#: State → label and CSS class.
_STATES: Final = {
    "bad": ("needs action", "is-bad"),
    "warn": ("needs a look", "is-warn"),
    "busy": ("at work", "is-busy"),
    "good": ("fine", "is-good"),
    "idle": ("never ran", ""),
}


@router.get("/")
async def show(
    request: Request, user: GetUserDep, number: Number = 1, q: Text = "", ask: bool = False
) -> HTMLResponse:
    """Shows the page; the brokers are queried by its script, or immediately with ``ask``.

    :param q: Filters pipelines and Dags by name.
    """
    return await _respond(request, "pipelines.html", user, number, q, ask=ask)


@router.get("/pipelines")
async def show_list(
    request: Request, user: GetUserDep, number: Number = 1, q: Text = ""
) -> HTMLResponse:
    """Returns the list of the page, with current depths."""
    return await _respond(request, "_pipelines.html", user, number, q, ask=True)


async def _respond(
    request: Request, template: str, user: Any, number: int, q: str, *, ask: bool
) -> HTMLResponse:
    listing = await READING(_build_listing, user, number, q)
    if ask and asks_brokers():
        shown = listing.standings
        await DEPTHS.ask([(one.declared.staging, one.declared.key, one.reported) for one in shown])
        listing = listing.reordered(DEPTHS.recall)
    return await run_in_threadpool(_render, request, template, listing, user, q, queried=ask)


def _build_listing(user: Any, number: int, q: str) -> Page:
    """Returns a page of the matching pipelines, from staging and Airflow's database."""
    declared = declared_pipelines()
    readable = readable_dags(user, {pipeline.dag_id for pipeline in declared})
    readable_ones = [pipeline for pipeline in declared if pipeline.dag_id in readable]
    matching = [one for one in readable_ones if q.lower() in "\n".join(one.key).lower()]
    return page_of(seen_root, matching, DEPTHS.recall, number=number, now=datetime.now(UTC))


def _render(
    request: Request, template: str, listing: Page, user: Any, q: str, *, queried: bool
) -> HTMLResponse:
    # The reasons may name hosts, files and queues of other teams.
    unknown = {s.declared.dag_id for s in listing.standings if s.depth and s.depth.unknown}
    return page(
        request,
        template,
        listing=listing,
        q=q,
        queried=queried,
        asks=asks_brokers(),
        states=_STATES,
        charts={(s.declared.dag_id, s.declared.name): _render_charts(s) for s in listing.standings},
        editable={dag_id for dag_id in unknown if may_edit(dag_id, user)},
        withheld=WITHHELD,
    )


def _render_charts(standing: Standing) -> Sequence[tuple[str, str, str, Markup]]:
    """Returns a pipeline's charts: title, newest value, top of the axis, image."""
    runs = list(reversed(standing.past))
    if not runs:
        return []
    names = [run.run_id for run in runs]
    shares = [run.failure_share for run in runs]
    # Scaled to the data, so that 1% is visible.
    most_failed = max((share for share in shares if share is not None), default=0.0)
    rendered = []
    for title, values, fmt, maximum in (
        ("Messages per minute", [run.per_minute for run in runs], count, None),
        ("Share that failed", shares, _format_percent, max(MANY_FAILED, most_failed)),
        ("Duration", [run.seconds for run in runs], seconds, None),
        ("Longest wait", [run.waited for run in runs], seconds, None),
    ):
        picture = bars(title, values, names, fmt, slots=SHOWN, maximum=maximum)
        known = [value for value in values if value is not None]
        top = fmt(maximum if maximum is not None else max(known)) if known else ""
        rendered.append((title, fmt(values[-1] if values else None), top, picture))
    return rendered


def _format_percent(value: float | None) -> str:
    if value is None:
        return "–"
    if 0 < value < 0.001:
        return "< 0.1%"
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"
