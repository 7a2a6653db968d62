"""The pipelines' page, from the navigation."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.airflow]


def test_navigation_lists_every_readable_pipeline(as_admin, letters, secret):
    # When an administrator clicks the entry in the navigation
    as_admin.open("/")
    as_admin.button("Browse").click()
    as_admin.link("Broadway", within="[role=menu]").click()
    as_admin.enter_frame("broadway/")

    # Then each pipeline is there, with what waits for it
    for dag_id in ("letters", "secret", "flights"):
        pipeline = f"#pipelines article[id^='{dag_id}:']"
        as_admin.wait_text(dag_id, pipeline, timeout=60)
        as_admin.wait_text("Waiting\n", pipeline, timeout=90)
        assert "unknown" not in as_admin.text(pipeline)


def test_a_viewer_sees_only_pipelines_of_readable_dags(as_viewer, letters, secret):
    as_viewer.open("/broadway/")

    as_viewer.wait_text("letters", "#pipelines", timeout=60)
    assert "secret" not in as_viewer.driver.page_source
