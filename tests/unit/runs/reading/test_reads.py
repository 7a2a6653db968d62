"""Reads for the page of a run with ten thousand batches do not grow with its messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.runs.reading.batches import PAGE, page_of_batches
from airflow_broadway.runs.reading.overview import overview_of
from airflow_broadway.staging.plan_choice import Recorded
from airflow_broadway.staging.store import Folder
from tests.unit.runs.reading.big_run import big_run

BATCHES = 10_000


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return big_run(tmp_path_factory.mktemp("big"), batches=BATCHES, size=1000)


@pytest.fixture
def requests(monkeypatch):
    """The number of requests to the store, by kind."""
    counts: Counter[str] = Counter()
    for kind in ("read", "list", "lines", "exists", "source"):
        real = getattr(Folder, kind)

        def counted(folder, path, real=real, kind=kind):
            counts[f"{kind} {_what(path)}"] += 1
            return real(folder, path)

        monkeypatch.setattr(Folder, kind, counted)
    return counts


def _what(path: str) -> str:
    name = path.rpartition("/")[2]
    if path.startswith("outcomes/") and name.endswith(".json"):
        return "outcome"
    return "copies" if name.startswith("gathered-") else name


def test_page_of_ten_million_messages_reads_few_files(run, requests):
    recorded = Recorded(run)

    overview = overview_of(run, recorded=recorded)
    page = page_of_batches(run, recorded=recorded)

    assert overview.totals["received"] == 10_000_000
    assert overview.balanced
    [flow] = overview.flows
    assert (flow.batches, flow.done, flow.handled) == (BATCHES, BATCHES, 10_000_000)
    assert (flow.successful, flow.failed) == (9_999_900, 100)
    assert (len(page.rows), page.total, page.pages) == (PAGE, BATCHES, 100)
    assert page.rows[0].result == "some failed"
    assert requests["read outcome"] == PAGE
    assert requests["read copies"] == 0
    assert requests["lines plan.jsonl"] == 1
    assert not [request for request in requests if "parquet" in request]
    others = sum(requests.values()) - PAGE
    assert others < 40, requests


def test_sorting_by_outcome_reads_gathered_copies(run, requests):
    page = page_of_batches(run, sort="seconds", descending=True)

    assert not page.too_many
    assert {row.outcome and row.outcome.seconds for row in page.rows} == {1.2}
    assert requests["read copies"] == BATCHES // 1000
    assert requests["read outcome"] == 0


def test_sorting_that_needs_too_many_files_is_refused(tmp_path):
    # Given outcomes that have no copies
    run = big_run(tmp_path, batches=1200, size=1)
    for path in tmp_path.rglob("gathered-*"):
        path.unlink()

    by_outcome = page_of_batches(run, sort="seconds")
    by_plan = page_of_batches(run, sort="messages")

    assert (by_outcome.too_many, by_outcome.sort) == (True, "plan")
    assert len(by_outcome.rows) == PAGE
    assert (by_plan.too_many, by_plan.sort) == (False, "messages")


def test_counts_without_report_are_unknown(tmp_path):
    run = big_run(tmp_path, batches=1200, size=10, settled=False)

    overview = overview_of(run)

    [flow] = overview.flows
    assert (flow.done, flow.handled) == (1200, 12_000)
    assert (flow.successful, flow.failed) == (None, None)
    assert overview.reasons is None
    assert overview.balanced is None
    assert overview.totals["still_leased"] == 12_000


def test_report_older_than_an_execution_is_ignored_for_it(tmp_path):
    # Given a settled run whose process task was cleared, and received anew
    run = big_run(tmp_path, batches=1200, size=10)
    [before] = overview_of(run).flows
    [record] = run.generations()
    lease = replace(Lease.from_json(record.lease), generation="0" * 31 + "2")
    run.open_generation(task_id="process", map_index=0, try_number=2, lease=lease)

    overview = overview_of(run)

    [flow] = overview.flows
    assert (before.successful, flow.successful) == (11_988, None)
    assert overview.reasons is None
