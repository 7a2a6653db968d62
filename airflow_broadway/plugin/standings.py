"""The status of pipelines: recent runs, messages in flight, and signs of trouble, worst first.

A few runs of every pipeline determine the order; more runs are read for the pipelines on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final

from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_broadway.core.errors import StagingError
from airflow_broadway.plugin.declared import Declared
from airflow_broadway.plugin.depths import Depth, Reported, depth_of
from airflow_broadway.runs.backlog.reports import PipelineKey, read_reports
from airflow_broadway.runs.reading.history import (
    BAD,
    WARN,
    Held,
    PastRun,
    RunKey,
    Sign,
    held_messages,
    past_runs,
    signs_of,
    waiting_signs,
)
from airflow_broadway.staging.store import READERS, Store

#: Newest runs of every pipeline that determine the order.
LOOKED: Final = 5
#: Newest runs of a pipeline on the page.
SHOWN: Final = 20
#: Pipelines on a page.
PER_PAGE: Final = 25

#: Returns the cached answer of the broker for a pipeline in a root.
Recall = Callable[[str | None, PipelineKey], Depth | None]

#: The states of a pipeline, in display order.
_ORDER: Final = (BAD, WARN, "busy", "good", "idle")


@dataclass(frozen=True, slots=True)
class LatestRun:
    """A run's id and its state in Airflow, such as ``"running"``."""

    run_id: str
    state: str

    @property
    def is_over(self) -> bool:
        """Whether the run has finished."""
        return self.state in ("success", "failed")


def latest_runs(dag_ids: Collection[str], most: int) -> dict[str, Sequence[LatestRun]]:
    """Returns the newest runs of each Dag, by creation, newest first: from Airflow's database, to
    avoid listing large staging folders.
    """
    runs: dict[str, Sequence[LatestRun]] = {}
    with create_session() as session:
        for dag_id in dag_ids:
            # One query per Dag, so that the index on dag_id limits the rows read.
            query = select(DagRun.run_id, DagRun.state).where(DagRun.dag_id == dag_id)
            rows = session.execute(query.order_by(DagRun.id.desc()).limit(most))
            runs[dag_id] = [LatestRun(run_id, str(state)) for run_id, state in rows]
    return runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A pipeline and its status.

    :param history: Its Dag's newest runs, newest first, each with its account if there is one.
    :param held: Its messages in flight; ``None`` if its runs cannot be read.
    :param unread: Why its runs cannot be read; empty if they can.
    :param reported: The last report of its queues.
    :param depth: The last known queue depth; ``None`` if no run, trigger or sensor has reported it.
    """

    declared: Declared
    history: Sequence[tuple[LatestRun, PastRun | None]] = ()
    held: Held | None = None
    unread: str = ""
    reported: Reported = None
    depth: Depth | None = None

    @property
    def past(self) -> Sequence[PastRun]:
        """The accounts of its runs, newest first, without dry runs."""
        return [past for _, past in self.history if past is not None and not past.dry]

    @property
    def signs(self) -> Sequence[Sign]:
        """Signs of trouble, the most severe first."""
        over = (run for run, past in self.history if run.is_over and not (past and past.dry))
        newest = next(over, None)
        failed = newest.run_id if newest is not None and newest.state == "failed" else None
        signs = signs_of(self.past, self.held, failed)
        if self.depth is not None:
            as_of = f"{self.depth.at:%Y-%m-%d %H:%M} UTC"
            signs += waiting_signs(self.depth.dead, self.depth.oldest_age, as_of)
        return sorted(signs, key=lambda sign: _ORDER.index(sign.level))

    @property
    def state(self) -> str:
        """``"bad"``, ``"warn"``, ``"busy"``, ``"good"``, or ``"idle"`` if it never ran."""
        if self.signs:
            return self.signs[0].level
        if any(not run.is_over for run, _ in self.history):
            return "busy"
        return "good" if self.history else "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of pipelines.

    :param number: The page number, from 1.
    :param total: The number of pipelines on all pages.
    """

    standings: Sequence[Standing]
    number: int
    pages: int
    total: int

    def reordered(self, recall: Recall) -> Page:
        """Returns the page with the current depths, reordered."""
        known = _with_depths(self.standings, recall)
        return replace(self, standings=sorted(known, key=_sort_key))


def page_of(
    open_root: Callable[[str | None], Store],
    declared: Sequence[Declared],
    recall: Recall,
    *,
    number: int,
    now: datetime,
) -> Page:
    """Returns a page of pipelines, those with trouble first.

    :param open_root: Opens a staging root; ``None``: that of Airflow's configuration.
    :param recall: Returns the cached depth of a pipeline's queues.
    :param number: The page number, from 1; the last page if it is too large.
    :raises StagingError: If a staging root cannot be read.
    """
    reader = _Reader(open_root, now)
    standings = reader.standings(declared, recall)
    pages = max(1, -(-len(standings) // PER_PAGE))
    number = min(max(1, number), pages)
    ordered = sorted(standings, key=_sort_key)[(number - 1) * PER_PAGE : number * PER_PAGE]
    return Page(
        standings=reader.with_runs(ordered, SHOWN),
        number=number,
        pages=pages,
        total=len(standings),
    )


def _with_depths(standings: Sequence[Standing], recall: Recall) -> list[Standing]:
    """Returns the standings with the cached answers of their brokers."""
    return [
        replace(one, depth=recall(one.declared.staging, one.declared.key) or one.depth)
        for one in standings
    ]


def _sort_key(standing: Standing) -> tuple[int, int, str, str]:
    declared, state = standing.declared, standing.state
    return _ORDER.index(state), -len(standing.signs), declared.dag_id, declared.name


class _Reader:
    """Reads the staged runs of pipelines, each from its own root."""

    def __init__(self, open_root: Callable[[str | None], Store], now: datetime) -> None:
        self._open_root = open_root
        self._now = now
        #: Staging root → store, or the error if it cannot be opened.
        self._stores: dict[str | None, Store | str] = {}
        #: The accounts read so far; ``None`` for runs without one.
        self._past: dict[RunKey, PastRun | None] = {}

    def standings(self, declared: Sequence[Declared], recall: Recall) -> list[Standing]:
        """Returns the status of all pipelines, from their newest runs."""
        for root in {pipeline.staging for pipeline in declared}:
            self._stores[root] = self._open_store(root)
        known = self.with_runs([Standing(declared=pipeline) for pipeline in declared], LOOKED)
        standings: list[Standing] = []
        for root, store in self._stores.items():
            members = [standing for standing in known if standing.declared.staging == root]
            if isinstance(store, str):
                standings += [replace(standing, unread=store) for standing in members]
                continue
            reports = read_reports(store, [standing.declared.key for standing in members])
            with ThreadPoolExecutor(READERS, "broadway-standings") as pool:
                held = pool.map(partial(self._read_held, store), members)
                for standing, messages in zip(members, held, strict=True):
                    reported = reports.get(standing.declared.key)
                    depth = depth_of(reported, self._now)
                    standings.append(
                        replace(standing, held=messages, reported=reported, depth=depth)
                    )
        return _with_depths(standings, recall)

    def with_runs(self, standings: Sequence[Standing], most: int) -> list[Standing]:
        """Returns the standings with this many of their newest runs."""
        latest = latest_runs({standing.declared.dag_id for standing in standings}, most)
        keys: dict[str | None, list[RunKey]] = {root: [] for root in self._stores}
        for standing in standings:
            pipeline = standing.declared
            keys[pipeline.staging] += (_key(pipeline, run) for run in latest[pipeline.dag_id])
        for root, store in self._stores.items():
            unread = [key for key in keys[root] if key not in self._past]
            if isinstance(store, Store):
                self._past |= dict.fromkeys(unread) | past_runs(store, unread)
        return [
            replace(
                standing,
                history=[
                    (run, self._past.get(_key(standing.declared, run)))
                    for run in latest[standing.declared.dag_id]
                ],
            )
            for standing in standings
        ]

    def _open_store(self, root: str | None) -> Store | str:
        try:
            if root is not None and "{{" in root:
                raise StagingError(f"its staging root is a template: {root}")
            return self._open_root(root)
        except StagingError as error:
            return str(error)

    def _read_held(self, store: Store, standing: Standing) -> Held:
        name, dag_id = standing.declared.key
        try:
            return held_messages(store, name, dag_id, self._now)
        except StagingError as error:  # one damaged file must not hide the other pipelines
            return Held(messages=None, receiving=0, late=(f"{error}.",), run_ids=())


def _key(declared: Declared, run: LatestRun) -> RunKey:
    return RunKey(declared.name, declared.dag_id, run.run_id)
