"""The page of a run's report, which its tasks link."""

from __future__ import annotations

import pytest

from airflow_broadway.plugin.pages import report as report_page
from airflow_broadway.plugin.run_tasks import RunTasks
from tests.unit.runs.steps import Run

PAGE = "/broadway/dags/sums/runs/manual__1/report"


@pytest.fixture(autouse=True)
def known(monkeypatch):
    known = RunTasks(state="running", pipelines=[])
    monkeypatch.setattr(report_page, "tasks_of_run", lambda dag_id, run_id: known)


def test_report_is_plain_text(site):
    run = Run(site.staging.parent, numbers=range(1, 8))
    run.batch(run.process())
    viewer = site.browser("VIEWER")
    assert "has no report yet" in viewer.get(PAGE).text

    run.ack()
    answer = viewer.get(PAGE)

    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == run.staged.files.read("report.md")
