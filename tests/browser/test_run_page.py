"""A user's actions on a run's page."""

from __future__ import annotations

import pytest

from tests.browser.chromium import Chromium
from tests.browser.messages import ID
from tests.browser.site import Run

pytestmark = [pytest.mark.browser, pytest.mark.airflow]


def find_message(browser: Chromium, run: Run, text: str) -> None:
    """Asks the run's page where a message is."""
    browser.open(run.page)
    browser.find("input[name=q]").send_keys(text)
    browser.button("Find").click()
    browser.wait_text("Where is my message?", "h1")


def test_batches_are_sorted_by_a_click(as_admin, letters):
    def numbers() -> list[int]:
        return [int(cell.text.split()[0]) for cell in as_admin.all(".batches td:nth-child(3)")]

    as_admin.open(letters.page)
    for way, backwards in (("ascending", False), ("descending", True)):
        # When its head is clicked
        as_admin.link("Messages", within=".batches thead").click()
        as_admin.find(f".batches th[aria-sort={way}]")

        # Then the column is in order
        unsorted = numbers()
        assert unsorted == sorted(unsorted, reverse=backwards)
        assert len(set(unsorted)) > 1


def test_messages_are_searchable_by_text_and_id(as_admin, letters):
    # Given a word of its payload
    find_message(as_admin, letters, "haystack-17")

    # When the one that has it is clicked
    [link] = as_admin.all("main li a")
    message_id = link.text
    assert message_id.startswith(ID)
    link.click()

    # Then there is its story, and what it carries
    as_admin.wait_text(message_id, "h2")
    assert "settled: ack" in as_admin.text(".story")
    assert "haystack-17" in as_admin.text("pre")

    # And its id alone leads there too
    find_message(as_admin, letters, message_id)
    assert as_admin.text("h2") == message_id


def test_a_viewer_finds_messages_by_id_without_payload(as_viewer, letters):
    first = f"{ID}-{1}"

    # When a read-only user searches a text
    find_message(as_viewer, letters, "haystack-17")

    # Then nothing is found, and a message by its id alone
    assert as_viewer.all("main li a") == []
    find_message(as_viewer, letters, first)
    assert "settled: ack" in as_viewer.text(".story")
    assert as_viewer.all("pre") == []
    assert "haystack" not in as_viewer.driver.page_source
