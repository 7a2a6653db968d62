"""Who gets in: Airflow's own users, and what each of them may."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.by import By

from tests.browser.chromium import Chromium
from tests.browser.site import Run, Site

pytestmark = [pytest.mark.browser, pytest.mark.airflow]


def test_a_user_logs_in_and_sees_the_dags(browser: Chromium, site: Site) -> None:
    # Given somebody whom nobody knows, who is asked for a name
    site.airflow.wait_for_dag("letters")
    browser.open("/dags")
    browser.find("input[name='username']").send_keys("viewer")
    browser.find("input[name='password']").send_keys("viewerviewer")

    # When it is told
    browser.driver.find_element(By.CSS_SELECTOR, "button[type='submit']").click()

    # Then the DAGs are there
    browser.wait_text("letters")
    browser.wait_text("flights")


def test_a_run_has_the_tab_and_the_menu_has_the_entry(as_admin: Chromium, letters: Run) -> None:
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


@pytest.mark.parametrize("path", ["", "?page=2"])
def test_who_is_not_logged_in_gets_nothing(site: Site, letters: Run, path: str) -> None:
    answer = site.get(letters.page + path)

    assert answer.status_code == 401
    assert letters.run_id not in answer.text.replace(letters.page, "")
    assert "haystack" not in answer.text


def test_a_viewer_reads_a_run(as_viewer: Chromium, letters: Run) -> None:
    as_viewer.open(letters.page)

    assert as_viewer.text("h1") == letters.run_id


def test_a_dag_that_a_user_may_not_read_tells_nothing(site: Site, secret: Run) -> None:
    # Given a run that the administrator may read
    assert site.get(secret.page, user="admin").status_code == 200

    # When another user asks for it
    answer = site.get(secret.page, user="viewer")

    # Then it is refused, and nothing of it told
    assert answer.status_code == 403
    assert secret.run_id not in answer.text
    assert "secret" not in site.get("/broadway/", user="viewer").text
