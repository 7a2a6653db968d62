"""The run page in Airflow's UI for ten million messages in 10,000 batches.

``view.settled`` reads the data of the page of a settled run, ``view.open`` that of a run with all
outcomes but without a report, ``view.sorted`` a page of batches sorted by duration.  ``view.page``
renders the settled run's page as HTML.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_broadway.runs.reading.batches import page_of_batches
from airflow_broadway.runs.reading.overview import overview_of
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.run_folder import StagedRun
from tests.benchmarks.figures import Figures, duration, temporary_folder
from tests.unit.plugin.site import mounted
from tests.unit.runs.reading.big_run import big_run, settle


def bench_view(batches: int = 10_000, tries: int = 5) -> Figures:
    """Measures all figures, without the first try of each."""
    import pytest

    with temporary_folder() as folder, pytest.MonkeyPatch.context() as patch:
        run = big_run(folder, batches=batches, settled=False)
        unsettled = _tries(tries, lambda: _facts(run))
        by_outcome = _tries(tries, lambda: page_of_batches(run, sort="seconds"))
        settle(run)
        settled = _tries(tries, lambda: _facts(run))
        with mounted(folder, patch) as site:
            browser = site.browser("VIEWER")
            page = _tries(tries, lambda: browser.get("/broadway/dags/sums/runs/manual__1"))
        return [
            duration("view.settled", settled),
            duration("view.open", unsettled),
            duration("view.sorted", by_outcome),
            duration("view.page", page),
        ]


def _facts(run: StagedRun) -> None:
    recorded = Recorded(run)
    overview_of(run, recorded=recorded)
    page_of_batches(run, recorded=recorded)


def _tries(tries: int, work: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(tries + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]
