"""The pages' script, and the pages without it."""

from __future__ import annotations

import pytest

from tests.browser.chromium import Chromium
from tests.browser.messages import ID

pytestmark = [pytest.mark.browser, pytest.mark.airflow]

LETTERS = "/broadway/dags/letters/pipelines/Letters/dead-letters"
BACKGROUND = "return getComputedStyle(document.documentElement).backgroundColor"


def brightness(browser: Chromium) -> int:
    """How bright the page is, from 0."""
    colour = browser.run(BACKGROUND)
    return sum(int(part) for part in colour.partition("(")[2].rstrip(")").split(",")[:3])


def test_timestamps_show_utc_and_local_time(as_admin, letters):
    # Given a viewer in Kathmandu, which is 5 hours and 45 minutes ahead
    as_admin.cdp("Emulation.setTimezoneOverride", timezoneId="Asia/Kathmandu")
    try:
        as_admin.open(letters.page)
        time = as_admin.find("time[title]")

        assert time.text == (time.get_attribute("datetime") or "")[:19].replace("T", " ")
        assert (time.get_attribute("datetime") or "").endswith("+00:00")
        words, title = time.text, time.get_attribute("title") or ""
        hour, minute = (int(part) for part in words[11:16].split(":"))
        ahead = (hour * 60 + minute + 345) % 1440
        assert f"{(ahead // 60 - 1) % 12 + 1}:{ahead % 60:02}:" in title, (words, title)
    finally:
        as_admin.cdp("Emulation.setTimezoneOverride", timezoneId="")


@pytest.mark.parametrize(("airflows", "systems"), [("dark", "light"), ("light", "dark")])
def test_the_colour_scheme_follows_airflow(as_admin, letters, airflows, systems):
    # Given a system that prefers the one, and an Airflow in which the other was chosen
    as_admin.colours(systems)
    as_admin.open(letters.page)
    try:
        assert (brightness(as_admin) > 380) == (systems == "light")
        as_admin.run("localStorage.setItem('theme', arguments[0])", airflows)

        as_admin.open(letters.page)

        assert (brightness(as_admin) > 380) == (airflows == "light")
    finally:
        as_admin.run("localStorage.removeItem('theme')")


@pytest.fixture
def without_script(as_admin):
    """A browser that runs no script."""
    as_admin.cdp("Emulation.setScriptExecutionDisabled", value=True)
    yield as_admin
    as_admin.cdp("Emulation.setScriptExecutionDisabled", value=False)


def test_pages_work_without_javascript(without_script, letters):
    browser = without_script

    # Batches are sorted
    browser.open(letters.page)
    browser.link("Messages", within=".batches thead").click()
    browser.find(".batches th[aria-sort=ascending]")
    # A message is found
    browser.find("input[name=q]").send_keys(f"{ID}-3")
    browser.button("Find").click()
    browser.find(".story")
    # Pipelines are found, and their brokers asked
    browser.open("/broadway/")
    browser.link("query them now").click()
    browser.wait_text("letters", "#pipelines", timeout=60)
    assert "Querying the brokers" not in browser.text("#pipelines")
    # And dead letters are marked, up to the question whether that is meant
    browser.open(f"{LETTERS}?reason=etc/passwd")
    box = browser.find("main input[name=chosen]", timeout=60)
    box.click()
    browser.button("Requeue marked …").click()
    browser.wait_text("Requeue 1 dead letter?", "h1", timeout=60)
