"""The form of "Trigger" in Airflow's UI: what is filled in is what the run does, and no other."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from selenium.webdriver.remote.webelement import WebElement

from tests.browser.chromium import Chromium
from tests.browser.site import Run, Site

pytestmark = [pytest.mark.browser, pytest.mark.airflow]

DIALOG = "[role=dialog]"
#: The form's sections, one of which is open at a time.
SOURCE, BUDGET = "Source of messages", "Budget"


class Form:
    """The form, as a person fills it in."""

    def __init__(self, browser: Chromium) -> None:
        self._browser = browser

    def field(self, section: str, css: str) -> WebElement:
        """Opens a section, if it is not, and returns one of its fields."""
        head = self._browser.button(section, within=DIALOG)
        if head.get_attribute("aria-expanded") != "true":
            head.click()
        return self._browser.find(f"{DIALOG} {css}")

    def choose_source(self, title: str) -> None:
        self.field(SOURCE, "#element_source [role=combobox]").click()
        self._browser.saying(f"{DIALOG} [role=option]", title).click()

    def dry_run(self) -> None:
        self.field(SOURCE, "[id='switch:element_dry_run']").click()
        assert self._browser.all("[name=element_dry_run]")[0].is_selected()

    def max_messages(self, number: int) -> None:
        self.field(BUDGET, "[name=element_max_messages]").send_keys(str(number))


@contextmanager
def triggered(browser: Chromium, dag_id: str) -> Iterator[Form]:
    """Opens the form of a Dag; sends it when filled in, and opens the run's tab."""
    browser.open(f"/dags/{dag_id}")
    browser.button("Trigger").click()
    browser.find(DIALOG)
    yield Form(browser)
    browser.button("Trigger", within=DIALOG).click()
    browser.link("Broadway", timeout=60).click()
    browser.enter_frame(f"broadway/dags/{dag_id}/runs/")


def shown_run(browser: Chromium, site: Site, dag_id: str) -> Run:
    """The run whose tab is shown, when it has succeeded."""
    path = browser.run("return window.location.pathname")
    run = Run(site, dag_id, urllib.parse.unquote(path.rpartition("/")[2]))
    run.wait()
    return run


@pytest.mark.timeout(300)
def test_form_values_apply_to_the_triggered_run_alone(as_admin, site):
    # Given a paused Dag whose runs by hand and by schedule have a queue each
    by_hand, by_schedule = site.queue("manual"), site.queue("scheduled")
    for queue in (by_hand, by_schedule):
        queue.send([b"bad", *(b"%d" % n for n in range(9))])
    site.airflow.wait_for_dag("form")

    # When it is started with the form's budget of 3 messages, which unpauses it, too
    with triggered(as_admin, "form") as form:
        form.choose_source("The live queue")
        form.max_messages(3)
    taken = shown_run(as_admin, site, "form")
    as_admin.wait_text("balanced", "h2", timeout=60)

    # Then that run takes 3, and the scheduled one next to it all
    assert "3 received" in as_admin.text(".sum")
    assert (by_hand.depth().ready, by_hand.depth().dead) == (7, 1)
    [scheduled] = [run for run in site.runs("form") if run.run_id.startswith("scheduled")]
    scheduled.wait()
    assert (by_schedule.depth().ready, by_schedule.depth().dead) == (0, 1)
    conf = {run.run_id: site.conf(run) for run in (taken, scheduled)}
    assert conf[taken.run_id]["max_messages"] == 3
    assert not conf[scheduled.run_id]

    # When the next run is only to look
    with triggered(as_admin, "form") as form:
        form.dry_run()
    shown_run(as_admin, site, "form")
    as_admin.wait_text("dry run", "h2", timeout=60)

    # Then it reports the backlog, and receives nothing
    assert "7 messages" in as_admin.text("section .notice")
    assert as_admin.all(".sum") == []
    assert (by_hand.depth().ready, by_hand.depth().dead) == (7, 1)

    # When it is to take the dead letters
    with triggered(as_admin, "form") as form:
        form.choose_source("The dead letters, sent back to the queue")
    shown_run(as_admin, site, "form")
    as_admin.wait_text("balanced", "h2", timeout=60)

    # Then it takes that one, and what waits
    assert "Dead letters" in as_admin.text("section")
    assert (by_hand.depth().ready, by_hand.depth().dead) == (0, 1)
