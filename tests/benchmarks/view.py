"""The pages in Airflow's UI: how long that of a run takes, ten million messages in 10,000 batches.

``view.settled`` are the facts of the page of a run with its report, ``view.open`` those of one that
has all its outcomes and no report yet, ``view.sorted`` a page of batches in order of their seconds,
and ``view.page`` the settled run's page as HTML.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_broadway.runs.reading.batches import page_of_batches
from airflow_broadway.runs.reading.overview import overview_of
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun
from tests.benchmarks.figures import Figures, folder_of_its_own, took
from tests.unit.plugin.site import mounted
from tests.unit.runs.reading.big_run import big_run, settle


def bench_view(batches: int = 10_000, tries: int = 5) -> Figures:
    """All figures; the first try of each is not counted."""
    import pytest

    with folder_of_its_own() as folder, pytest.MonkeyPatch.context() as patch:
        run = big_run(folder, batches=batches, settled=False)
        unsettled = _tries(tries, lambda: _facts(run))
        by_outcome = _tries(tries, lambda: page_of_batches(run, sort="seconds"))
        settle(run)
        settled = _tries(tries, lambda: _facts(run))
        with mounted(folder, patch) as site:
            browser = site.browser("VIEWER")
            page = _tries(tries, lambda: browser.get("/broadway/dags/sums/runs/manual__1"))
        return [
            took("view.settled", settled),
            took("view.open", unsettled),
            took("view.sorted", by_outcome),
            took("view.page", page),
        ]


def _facts(run: StagedRun) -> None:
    recorded = Recorded(run)
    overview_of(run, recorded=recorded)
    page_of_batches(run, recorded=recorded)


def _tries(tries: int, work: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(tries + 1):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return found[1:]
