"""The status of pipelines: recent runs, messages in flight, and signs of trouble, worst first.

A few runs of every pipeline determine the order; more runs are read for the pipelines on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from airflow_broadway.core.errors import StagingError
from airflow_broadway.plugin.declared import Declared
from airflow_broadway.plugin.depths import Depth, Reported, depth_of
from airflow_broadway.plugin.latest import LatestRun, latest_runs
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A pipeline and its status.

    :param latest: Its Dag's newest runs, newest first.
    :param runs: Run id → accounted run.
    :param held: Its messages in flight; ``None`` if its runs cannot be read.
    :param unread: Why its runs cannot be read; empty if they can.
    :param reported: The last report of its queues.
    :param depth: The last known queue depth; ``None`` if no run, trigger or sensor has reported it.
    """

    declared: Declared
    latest: Sequence[LatestRun]
    runs: Mapping[str, PastRun]
    held: Held | None
    unread: str
    reported: Reported
    depth: Depth | None

    @property
    def signs(self) -> Sequence[Sign]:
        """Signs of trouble, the most severe first."""
        newest = next((run for run, past in self.history if run.is_over and not _dry(past)), None)
        failed = newest.run_id if newest is not None and newest.state == "failed" else None
        runs = [self.runs[run.run_id] for run in self.latest if run.run_id in self.runs]
        signs = signs_of(runs, self.held, failed)
        if self.depth is not None:
            as_of = f"{self.depth.at:%Y-%m-%d %H:%M} UTC"
            signs += waiting_signs(self.depth.dead, self.depth.oldest_age, as_of)
        return sorted(signs, key=lambda sign: _ORDER.index(sign.level))

    @property
    def state(self) -> str:
        """``"bad"``, ``"warn"``, ``"busy"``, ``"good"``, or ``"idle"`` if it never ran."""
        if self.signs:
            return self.signs[0].level
        if any(not run.is_over for run in self.latest):
            return "busy"
        return "good" if self.latest else "idle"

    @property
    def history(self) -> Sequence[tuple[LatestRun, PastRun | None]]:
        """Its Dag's newest runs, newest first, each with its account if there is one."""
        return [(run, self.runs.get(run.run_id)) for run in self.latest]


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
        known = [
            replace(one, depth=recall(one.declared.staging, one.declared.key) or one.depth)
            for one in self.standings
        ]
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
        standings=reader.with_more_runs(ordered),
        number=number,
        pages=pages,
        total=len(standings),
    )


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

    def standings(self, declared: Sequence[Declared], recall: Recall) -> list[Standing]:
        """Returns the status of all pipelines, from their newest runs."""
        latest = latest_runs({pipeline.dag_id for pipeline in declared}, LOOKED)
        runs = self._read_past_runs((pipeline, latest[pipeline.dag_id]) for pipeline in declared)
        with ThreadPoolExecutor(READERS, "broadway-standings") as pool:
            held = list(pool.map(self._read_held, declared))
        reports = self._read_reports(declared)
        return [
            Standing(
                declared=pipeline,
                latest=latest[pipeline.dag_id],
                runs=runs.get(_key(pipeline), {}),
                held=messages,
                unread="" if isinstance(store := self._open_store(pipeline), Store) else store,
                reported=reports.get((pipeline.staging, pipeline.key)),
                depth=recall(pipeline.staging, pipeline.key)
                or depth_of(reports.get((pipeline.staging, pipeline.key)), self._now),
            )
            for pipeline, messages in zip(declared, held, strict=True)
        ]

    def with_more_runs(self, standings: Sequence[Standing]) -> list[Standing]:
        """Returns the standings with all runs of the page."""
        latest = latest_runs({standing.declared.dag_id for standing in standings}, SHOWN)
        further = (
            (
                standing.declared,
                [run for run in latest[standing.declared.dag_id] if run not in standing.latest],
            )
            for standing in standings
        )
        runs = self._read_past_runs(further)
        return [
            replace(
                standing,
                latest=latest[standing.declared.dag_id],
                runs={**standing.runs, **runs.get(_key(standing.declared), {})},
            )
            for standing in standings
        ]

    def _open_store(self, declared: Declared) -> Store | str:
        root = declared.staging
        if root not in self._stores:
            try:
                if root is not None and "{{" in root:
                    raise StagingError(f"its staging root is a template: {root}")
                self._stores[root] = self._open_root(root)
            except StagingError as error:
                self._stores[root] = str(error)
        return self._stores[root]

    def _read_held(self, declared: Declared) -> Held | None:
        store = self._open_store(declared)
        if not isinstance(store, Store):
            return None
        try:
            return held_messages(store, declared.name, declared.dag_id, self._now)
        except StagingError as error:  # one damaged file must not hide the other pipelines
            return Held(messages=None, receiving=0, late=(f"{error}.",), run_ids=())

    def _read_reports(
        self, declared: Sequence[Declared]
    ) -> dict[tuple[str | None, PipelineKey], Reported]:
        """Returns the last report of each pipeline's queues, by root."""
        keys: dict[str | None, list[PipelineKey]] = {}
        for pipeline in declared:
            keys.setdefault(pipeline.staging, []).append(pipeline.key)
        reports: dict[tuple[str | None, PipelineKey], Reported] = {}
        for root, wanted in keys.items():
            store = self._stores[root]
            if isinstance(store, Store):
                for key, report in read_reports(store, wanted).items():
                    reports[root, key] = report
        return reports

    def _read_past_runs(
        self, wanted: Iterable[tuple[Declared, Sequence[LatestRun]]]
    ) -> dict[tuple[str, str], dict[str, PastRun]]:
        """Returns the accounts of these runs: (Dag, pipeline) → run id → run."""
        keys: dict[str | None, list[RunKey]] = {}
        for declared, runs in wanted:
            if isinstance(self._open_store(declared), Store):
                keys.setdefault(declared.staging, []).extend(
                    RunKey(declared.name, declared.dag_id, run.run_id) for run in runs
                )
        past: dict[tuple[str, str], dict[str, PastRun]] = {}
        for root, run_keys in keys.items():
            store = self._stores[root]
            assert isinstance(store, Store)
            for key, run in past_runs(store, run_keys).items():
                past.setdefault((key.dag_id, key.pipeline), {})[key.run_id] = run
        return past


def _dry(past: PastRun | None) -> bool:
    """Returns whether a run was a dry run, which does not count for the status."""
    return past is not None and past.dry


def _key(declared: Declared) -> tuple[str, str]:
    return declared.dag_id, declared.name
