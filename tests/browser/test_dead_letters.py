"""The dead letters' page, from a letter to the run that handles it."""

from __future__ import annotations

import urllib.parse

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.airflow]

PAGE = "/broadway/dags/{dag}/pipelines/Letters/dead-letters"

#: A call of the command line starts a process.
PATIENCE = 90.0


def test_a_viewer_sees_the_list_no_payload_and_no_button(as_viewer, site, letters):
    as_viewer.open(PAGE.format(dag="letters"))

    as_viewer.wait_text("<script>window.owned='script'</script>", "main", PATIENCE)
    assert as_viewer.all("main form[method=post] button, main input[type=checkbox]") == []
    assert as_viewer.all("main th a") == []


def test_a_dead_letter_is_requeued_by_a_run_started_from_the_page(as_admin, site, letters):
    # Given a dead letter that an administrator looks at
    as_admin.open(PAGE.format(dag="letters") + "?reason=etc/passwd&stage=process")
    [link] = as_admin.all("main tbody th a")
    message_id = link.text
    link.click()
    as_admin.wait_text("bad: ../../../../etc/passwd", "pre", PATIENCE)
    before = site.queue("letters").depth().dead

    # When it is sent back, as the page then asks once more
    as_admin.button("Requeue …").click()
    as_admin.wait_text("Requeue 1 dead letter?", "h1", PATIENCE)
    assert site.queue("letters").depth().dead == before
    as_admin.button("Requeue 1").click()
    as_admin.wait_text("A run requeues the dead letters", "h1", PATIENCE)
    [link] = as_admin.all("main .notice a")
    page = f"/broadway/dags/letters/runs/{urllib.parse.quote(link.text, safe='')}"

    # Then that run receives it, and as the trouble is not mended it becomes a dead letter again
    as_admin.open(page)
    as_admin.wait_text("1 dead-lettered", "main", PATIENCE)
    as_admin.open(f"{page}/message?q={urllib.parse.quote(message_id)}")
    as_admin.wait_text("settled: dead_letter", ".story")
    assert site.queue("letters").depth().dead == before
