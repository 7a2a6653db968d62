"""The pipelines' page: those of every Dag that the user may see, what needs a look first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from airflow_broadway.plugin.access import WITHHELD, GetUserDep, may_edit, readable_dags
from airflow_broadway.plugin.charts import bars
from airflow_broadway.plugin.children import asks_brokers
from airflow_broadway.plugin.declared import declared_pipelines
from airflow_broadway.plugin.depths import DEPTHS
from airflow_broadway.plugin.reading import READING
from airflow_broadway.plugin.render import count, page, seconds
from airflow_broadway.plugin.staged import seen_root
from airflow_broadway.plugin.standings import SHOWN, Page, Standing, page_of
from airflow_broadway.runs.reading.history import MANY_FAILED

router = APIRouter()

Number = Annotated[int, Query(alias="page", ge=1, le=1_000_000)]
Text = Annotated[str, Query(max_length=250)]

#: What a state is called, and the class of its mark.
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
    """The page; it has its brokers asked once it is shown, or at once where no script runs.

    :param q: Only pipelines and Dags whose names contain it.
    """
    found = await READING(_found, user, number, q)
    if ask:
        found = await _asked(found)
    return await run_in_threadpool(_page, request, "pipelines.html", found, user, q, asked=ask)


@router.get("/pipelines")
async def listed(
    request: Request, user: GetUserDep, number: Number = 1, q: Text = ""
) -> HTMLResponse:
    """The list of the page, with what its brokers say now."""
    found = await _asked(await READING(_found, user, number, q))
    return await run_in_threadpool(_page, request, "_pipelines.html", found, user, q, asked=True)


def _found(user: Any, number: int, q: str) -> Page:
    """What files and Airflow's database say."""
    declared = declared_pipelines()
    readable = readable_dags(user, {each.dag_id for each in declared})
    wanted = [
        each
        for each in declared
        if each.dag_id in readable and q.lower() in f"{each.dag_id}\n{each.name}".lower()
    ]
    return page_of(seen_root, wanted, DEPTHS.recall, number=number, now=datetime.now(UTC))


async def _asked(found: Page) -> Page:
    """The same page with what waits at the brokers, if they may be asked."""
    if not asks_brokers():
        return found
    await DEPTHS.ask(
        [(each.declared.staging, each.declared.key, each.reported) for each in found.standings]
    )
    return found.reordered(DEPTHS.recall)


def _page(
    request: Request, template: str, found: Page, user: Any, q: str, *, asked: bool
) -> HTMLResponse:
    # Why a depth is unknown may name hosts, files and queues of others.
    unknown = {s.declared.dag_id for s in found.standings if s.depth and s.depth.unknown}
    return page(
        request,
        template,
        found=found,
        q=q,
        asked=asked,
        asks=asks_brokers(),
        states=_STATES,
        charts={(s.declared.dag_id, s.declared.name): _charts(s) for s in found.standings},
        editable={dag_id for dag_id in unknown if may_edit(dag_id, user)},
        withheld=WITHHELD,
    )


def _charts(standing: Standing) -> Sequence[tuple[str, str, str, Markup]]:
    """The charts of a pipeline: title, newest value, the value at the top, picture."""
    runs = [run for _, run in reversed(standing.history) if run is not None and not run.dry]
    names = [run.run_id for run in runs]
    shares = [run.failure_share for run in runs]
    # As high as it needs to be, so that one in a hundred is seen.
    most_failed = max((share for share in shares if share is not None), default=0.0)
    drawn = []
    for title, values, shown, most in (
        ("Messages per minute", [run.per_minute for run in runs], count, None),
        ("Share that failed", shares, _percent, max(MANY_FAILED, most_failed)),
        ("Duration", [run.seconds for run in runs], seconds, None),
        ("Longest wait", [run.waited for run in runs], seconds, None),
    ):
        picture = bars(title, values, names, shown, places=SHOWN, most=most)
        known = [value for value in values if value is not None]
        top = shown(most if most is not None else max(known)) if known else ""
        drawn.append((title, shown(values[-1] if values else None), top, picture))
    return drawn


def _percent(value: float | None) -> str:
    if value is None:
        return "–"
    if 0 < value < 0.001:
        return "< 0.1%"
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"
