"""Another site's page can neither act for its visitor, nor frame our pages."""

from __future__ import annotations

import html
import re

import pytest

from tests.browser.elsewhere import another_site

pytestmark = [pytest.mark.browser, pytest.mark.airflow]

LETTERS = "/broadway/dags/letters/pipelines/Letters/dead-letters"

#: The fields of the page's own form, for all dead letters.
FIELDS = {"scope": "all", "confirmed": "yes"}


def form(to: str, fields: dict[str, str], method: str = "post", kind: str = "") -> str:
    inputs = "".join(
        f'<input name="{name}" value="{html.escape(value)}">' for name, value in fields.items()
    )
    return (
        f'<form action="{to}" method="{method}" enctype="{kind}">{inputs}</form>'
        "<script>document.forms[0].submit()</script>"
    )


@pytest.mark.parametrize("action", ["requeue", "delete"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_cross_site_form_changes_nothing(as_admin, site, letters, action, kind):
    # Given an administrator with dead letters, and a token that another user was given
    before, runs = site.queue("letters").depth().dead, site.runs("letters")
    assert before
    page = site.get(LETTERS, user="viewer").text
    token, *_ = re.findall(r'name="csrf" value="([^"]+)"', page)
    fields = {**FIELDS, "csrf": token}

    # When a page elsewhere sends the form as soon as it is visited
    to = f"{site.url}{LETTERS}/{action}"
    with another_site(form(to, fields, kind=kind)) as (address, _):
        as_admin.driver.get(address)
        as_admin.wait_text("You may not do this")

    # Then the browser has sent the cookies along, and nothing has happened
    assert as_admin.driver.current_url == to
    assert as_admin.cdp("Network.getCookies", urls=[to])["cookies"]
    assert site.queue("letters").depth().dead == before
    assert site.runs("letters") == runs


def test_pages_cannot_be_framed(as_admin, site, letters):
    frame = f'<iframe src="{site.url}{letters.page}" width=900 height=600></iframe>'

    with another_site(frame) as (address, _):
        as_admin.driver.get(address)
        as_admin.driver.switch_to.frame(as_admin.find("iframe"))
        framed = as_admin.driver.page_source
        as_admin.driver.switch_to.default_content()
        complaints = " ".join(as_admin.complaints())

    assert letters.run_id not in framed
    assert "frame-ancestors" in complaints
