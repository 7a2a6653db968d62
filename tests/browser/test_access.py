"""Access by Airflow's users, and their permissions."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator

import pytest
from fastapi.routing import APIRoute
from selenium.webdriver.common.by import By

from airflow_broadway.plugin.app import create_app
from tests.browser.site import Run

pytestmark = [pytest.mark.browser, pytest.mark.airflow]


def test_a_user_logs_in_and_sees_the_dags(browser, site):
    # Given an anonymous browser at the login form
    site.airflow.wait_for_dag("letters")
    browser.open("/dags")
    browser.find("input[name='username']").send_keys("viewer")
    browser.find("input[name='password']").send_keys("viewerviewer")

    # When it logs in
    browser.driver.find_element(By.CSS_SELECTOR, "button[type='submit']").click()

    # Then the DAGs are there
    browser.wait_text("letters")
    browser.wait_text("flights")


def test_a_run_has_the_tab_and_the_menu_has_the_entry(as_admin, letters):
    # Given the page of a run in Airflow's UI
    as_admin.open(f"/dags/letters/runs/{letters.run_id}")

    # When its tab is clicked
    as_admin.link("Broadway").click()

    # Then it shows the run
    as_admin.enter_frame("broadway/dags/letters/runs/")
    assert as_admin.text("h1") == letters.run_id

    # And the menu leads to the pipelines
    as_admin.driver.switch_to.default_content()
    as_admin.button("Browse").click()
    assert as_admin.link("Broadway", within="[role=menu]").get_attribute("href")


def routes(run: Run) -> Iterator[tuple[str, str]]:
    """Each method and path that the pages have, for a run's Dag and pipeline."""
    known = {"dag_id": run.dag_id, "run_id": urllib.parse.quote(run.run_id), "pipeline": "Letters"}
    for route in create_app().routes:
        if isinstance(route, APIRoute):
            parameters = {name: known.get(name, "1") for name in route.param_convertors}
            for method in sorted(route.methods):
                yield method, "/broadway" + route.path_format.format(**parameters)


def test_anonymous_requests_are_refused(site, letters):
    for method, path in routes(letters):
        answer = site.request(method, path)

        assert answer.status_code == 401, (method, path)
        for words in ("haystack", "acked", "dead letters of"):
            assert words not in answer.text


def test_a_viewer_changes_nothing(site, letters):
    changing = [(method, path) for method, path in routes(letters) if method != "GET"]

    answers = {path: site.request(method, path, user="viewer") for method, path in changing}

    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(
        answers, 403
    )


def test_pages_of_an_unreadable_dag_are_refused(site, secret):
    # Given a run that the administrator may read
    assert site.get(secret.page, user="admin").status_code == 200

    # When another user asks for each of its pages, and for what is about all DAGs
    answers = {path: site.request(method, path, user="viewer") for method, path in routes(secret)}

    # Then the Dag's own pages are refused, and reveal nothing
    for path, answer in answers.items():
        assert answer.status_code == 403 or "secret" not in path, path
        assert "secret" not in answer.text.replace(path, "").replace("a secret", "")


def test_a_viewer_reads_a_run(as_viewer, letters):
    as_viewer.open(letters.page)

    assert as_viewer.text("h1") == letters.run_id
