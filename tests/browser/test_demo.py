"""A run's page, as a user follows the demo on it."""

from __future__ import annotations

import pytest

from tests.browser.messages import FLIGHTS, fill_flights

pytestmark = [pytest.mark.browser, pytest.mark.airflow, pytest.mark.spark]


def shown(number: int) -> str:
    """A number as the pages show it."""
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


@pytest.mark.timeout(400)
def test_the_demo_runs_from_trigger_to_success(as_admin, site):
    # Given flights in the queue
    before = site.queue("flights").depth().dead or 0
    never = fill_flights(site)
    site.airflow.wait_for_dag("flights")

    # When its user clicks "Trigger", and looks at the run's tab
    as_admin.open("/dags/flights")
    as_admin.button("Trigger").click()
    as_admin.button("Trigger", within="[role=dialog]").click()
    as_admin.link("Broadway", timeout=60).click()
    as_admin.enter_frame("broadway/dags/flights/runs/")
    as_admin.run("window.same = true")

    # Then the page follows the run by itself, to its end
    seen: list[str] = []

    def over(_: object) -> bool:
        standing = as_admin.text("h2")
        if standing and standing not in seen:
            seen.append(standing)
        return "Flights balanced" in standing

    as_admin.until(over, "the run does not end", timeout=240)
    assert len(seen) >= 2, seen
    assert as_admin.run("return window.same"), "the page was loaded anew"

    # And every flight is in the sum
    total = as_admin.text(".sum")
    assert f"{shown(FLIGHTS)} received" in total
    assert f"{shown(FLIGHTS - never)} acked" in total
    assert f"{shown(never)} dead-lettered" in total
    assert site.queue("flights").depth().dead == before + never
