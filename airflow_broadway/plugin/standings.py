"""How pipelines stand: the last runs of each, what it holds, and what needs a look, that first.

Of every pipeline some newest runs are read, which decide the order; of those on a page, more.
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

#: Newest runs of every pipeline that decide its place.
LOOKED: Final = 5
#: Newest runs of a pipeline that are shown.
SHOWN: Final = 20
#: Pipelines on a page.
PER_PAGE: Final = 25

#: What a broker has answered lately of a pipeline in a root.
Recall = Callable[[str | None, PipelineKey], Depth | None]

#: What a pipeline is, from what comes first to what comes last.
_ORDER: Final = (BAD, WARN, "busy", "good", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A pipeline, and how it stands.

    :param latest: Its Dag's newest runs, the newest first.
    :param runs: Those of them that were accounted for, by their ids.
    :param held: ``None`` if its runs cannot be read.
    :param unread: Why they cannot; empty if they can.
    :param reported: The last report of its queues.
    :param depth: What waits at its broker, and since when that is known; ``None`` if no run,
        trigger or sensor has reported it yet.
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
        """Why people should look at it, the gravest first."""
        newest = next((run for run, past in self.history if run.is_over and not _dry(past)), None)
        failed = newest.run_id if newest is not None and newest.state == "failed" else None
        runs = [self.runs[each.run_id] for each in self.latest if each.run_id in self.runs]
        signs = signs_of(runs, self.held, failed)
        if self.depth is not None:
            as_of = f"{self.depth.at:%Y-%m-%d %H:%M} UTC"
            signs += waiting_signs(self.depth.dead, self.depth.oldest_age, as_of)
        return sorted(signs, key=lambda each: _ORDER.index(each.level))

    @property
    def state(self) -> str:
        """``"bad"``, ``"warn"``, ``"busy"``, ``"good"``, or ``"idle"``: it never ran."""
        if self.signs:
            return self.signs[0].level
        if any(not each.is_over for each in self.latest):
            return "busy"
        return "good" if self.latest else "idle"

    @property
    def history(self) -> Sequence[tuple[LatestRun, PastRun | None]]:
        """Its Dag's newest runs, the newest first, and what is known of each."""
        return [(each, self.runs.get(each.run_id)) for each in self.latest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some of the pipelines.

    :param number: From 1.
    :param total: How many pipelines there are on all pages.
    """

    standings: Sequence[Standing]
    number: int
    pages: int
    total: int

    def reordered(self, recall: Recall) -> Page:
        """The same ones with what is known of their brokers by now, in the order of that."""
        known = [
            replace(each, depth=recall(each.declared.staging, each.declared.key) or each.depth)
            for each in self.standings
        ]
        return replace(self, standings=sorted(known, key=_place))


def page_of(
    open_root: Callable[[str | None], Store],
    declared: Sequence[Declared],
    recall: Recall,
    *,
    number: int,
    now: datetime,
) -> Page:
    """A page of these pipelines, what needs a look first.

    :param open_root: Opens a staging root; ``None``: that of Airflow's configuration.
    :param recall: What is known of a pipeline's broker.
    :param number: Which page, from 1; the last one, if there are not so many.
    :raises StagingError: If a staging root cannot be read.
    """
    reader = _Reader(open_root, now)
    standings = reader.standings(declared, recall)
    pages = max(1, -(-len(standings) // PER_PAGE))
    number = min(max(1, number), pages)
    ordered = sorted(standings, key=_place)[(number - 1) * PER_PAGE : number * PER_PAGE]
    return Page(
        standings=reader.with_more_runs(ordered),
        number=number,
        pages=pages,
        total=len(standings),
    )


def _place(standing: Standing) -> tuple[int, int, str, str]:
    declared, state = standing.declared, standing.state
    return _ORDER.index(state), -len(standing.signs), declared.dag_id, declared.name


class _Reader:
    """Reads the staged runs of pipelines, each in its own root."""

    def __init__(self, open_root: Callable[[str | None], Store], now: datetime) -> None:
        self._open_root = open_root
        self._now = now
        #: By the root that a pipeline names: the store, or why it cannot be read.
        self._stores: dict[str | None, Store | str] = {}

    def standings(self, declared: Sequence[Declared], recall: Recall) -> list[Standing]:
        """All of them, by their newest runs."""
        latest = latest_runs({each.dag_id for each in declared}, LOOKED)
        runs = self._past_runs((each, latest[each.dag_id]) for each in declared)
        with ThreadPoolExecutor(READERS, "broadway-standings") as pool:
            held = list(pool.map(self._held, declared))
        reports = self._reports(declared)
        return [
            Standing(
                declared=each,
                latest=latest[each.dag_id],
                runs=runs.get(_key(each), {}),
                held=holds,
                unread="" if isinstance(store := self._store(each), Store) else store,
                reported=reports.get((each.staging, each.key)),
                depth=recall(each.staging, each.key)
                or depth_of(reports.get((each.staging, each.key)), self._now),
            )
            for each, holds in zip(declared, held, strict=True)
        ]

    def with_more_runs(self, standings: Sequence[Standing]) -> list[Standing]:
        """The same ones with as many runs as are shown."""
        latest = latest_runs({each.declared.dag_id for each in standings}, SHOWN)
        further = (
            (each.declared, [run for run in latest[each.declared.dag_id] if run not in each.latest])
            for each in standings
        )
        runs = self._past_runs(further)
        return [
            replace(
                each,
                latest=latest[each.declared.dag_id],
                runs={**each.runs, **runs.get(_key(each.declared), {})},
            )
            for each in standings
        ]

    def _store(self, declared: Declared) -> Store | str:
        root = declared.staging
        if root not in self._stores:
            try:
                if root is not None and "{{" in root:
                    raise StagingError(f"its staging root is a template: {root}")
                self._stores[root] = self._open_root(root)
            except StagingError as error:
                self._stores[root] = str(error)
        return self._stores[root]

    def _held(self, declared: Declared) -> Held | None:
        store = self._store(declared)
        if not isinstance(store, Store):
            return None
        try:
            return held_messages(store, declared.name, declared.dag_id, self._now)
        except StagingError as error:  # one damaged file must not hide the other pipelines
            return Held(messages=None, receiving=0, late=(f"{error}.",), run_ids=())

    def _reports(
        self, declared: Sequence[Declared]
    ) -> dict[tuple[str | None, PipelineKey], Reported]:
        """The last report of each pipeline's queues, by its root."""
        keys: dict[str | None, list[PipelineKey]] = {}
        for each in declared:
            keys.setdefault(each.staging, []).append(each.key)
        found: dict[tuple[str | None, PipelineKey], Reported] = {}
        for root, wanted in keys.items():
            store = self._stores[root]
            if isinstance(store, Store):
                for key, report in read_reports(store, wanted).items():
                    found[root, key] = report
        return found

    def _past_runs(
        self, wanted: Iterable[tuple[Declared, Sequence[LatestRun]]]
    ) -> dict[tuple[str, str], dict[str, PastRun]]:
        """What is known of these runs, by Dag and pipeline, and by id."""
        keys: dict[str | None, list[RunKey]] = {}
        for declared, runs in wanted:
            if isinstance(self._store(declared), Store):
                keys.setdefault(declared.staging, []).extend(
                    RunKey(declared.name, declared.dag_id, run.run_id) for run in runs
                )
        found: dict[tuple[str, str], dict[str, PastRun]] = {}
        for root, wanted_there in keys.items():
            store = self._stores[root]
            assert isinstance(store, Store)
            for key, run in past_runs(store, wanted_there).items():
                found.setdefault((key.dag_id, key.pipeline), {})[key.run_id] = run
        return found


def _dry(past: PastRun | None) -> bool:
    """Whether a run is known to have only looked: it tells nothing of how its pipeline stands."""
    return past is not None and past.dry


def _key(declared: Declared) -> tuple[str, str]:
    return declared.dag_id, declared.name
