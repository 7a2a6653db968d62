"""Who gets in: Airflow's own users, and what each of them may."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.by import By

from tests.browser.chromium import Chromium
from tests.browser.site import Site

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
