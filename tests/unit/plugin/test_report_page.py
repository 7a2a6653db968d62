"""A run's report, as the link of each task shows it."""

from __future__ import annotations

import pytest

from airflow_broadway.plugin.declared import RunTasks
from airflow_broadway.plugin.pages import run as report_page
from tests.unit.plugin.site import Site
from tests.unit.runs.steps import Run

PAGE = "/broadway/dags/sums/runs/manual__1/report"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    known = RunTasks(state="running", pipelines=[])
    monkeypatch.setattr(report_page, "tasks_of_run", lambda dag_id, run_id: known)


def test_it_is_plain_text_for_who_may_see_the_run(site: Site) -> None:
    run = Run(site.staging.parent)
    run.send(range(1, 8))
    run.batch(run.process())
    viewer = site.browser("VIEWER")
    assert "has no report yet" in viewer.get(PAGE).text

    run.ack()
    answer = viewer.get(PAGE)

    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == run.staged.files.read("report.md")
