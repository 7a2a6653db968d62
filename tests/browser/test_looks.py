"""Pages that can be read and used: in light and dark, on a phone, by keyboard and screen reader."""

from __future__ import annotations

import urllib.parse

import pytest

from tests.browser.looks import complaints_of_looks, not_reached_by_tab, too_wide_on_a_phone
from tests.browser.messages import ID

pytestmark = [pytest.mark.browser, pytest.mark.airflow]

#: Each page, by the name of its pictures.
PAGES = {
    "run": "{demo}",
    "letters": "{letters}",
    "message": "{letters}/message?q={id}-3",
    "pipelines": "/broadway/?ask=true",
    "dead-letters": "/broadway/dags/letters/pipelines/Letters/dead-letters",
}


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_accessible(as_admin, letters, screens, request, name):
    known = {"letters": letters.page, "id": urllib.parse.quote(ID)}
    if "{demo}" in PAGES[name]:
        known["demo"] = request.getfixturevalue("demo").page
    as_admin.open(PAGES[name].format(**known))

    complaints = []
    for scheme in ("light", "dark"):
        as_admin.colours(scheme)
        as_admin.picture(screens / f"{name}-{scheme}.png", whole=True)
        complaints += [f"{scheme}: {look}" for look in complaints_of_looks(as_admin)]
    complaints += not_reached_by_tab(as_admin)
    complaints += too_wide_on_a_phone(as_admin)
    as_admin.picture(screens / f"{name}-phone.png", whole=True)

    assert complaints == []


#: An inaccessible page.
BAD = """\
<!doctype html><title>bad</title><meta name=viewport content="width=device-width">
<main><h1>Bad</h1><h3>too deep</h3>
<p style="color: #999; background: #eee">pale</p>
<svg width=90 height=20><rect width=90 height=20 fill="#036"/>
<text y=12 fill="#047">dim</text></svg>
<table><tr><th>head</table>
<button></button>
<a href="#x" style="outline: none">no ring</a>
<button style="position: absolute; left: 900px; width: 500px">far</button>
<dialog open inert><a href="#y">out of reach</a></dialog>
"""


def test_an_inaccessible_page_is_reported(browser):
    browser.driver.get("data:text/html," + urllib.parse.quote(BAD))

    complaints = " ".join(
        [*complaints_of_looks(browser), *not_reached_by_tab(browser), *too_wide_on_a_phone(browser)]
    )

    for words in (
        "<p> pale",
        "<text> dim",
        "no language",
        "comes after an h1",
        "<table> has no caption",
        "th head has no scope",
        "<svg> has no name",
        "a button has no name",
        "nothing shows that <a> has the focus",
        "Tab never reaches <a>",
        "of 390: <button>",
    ):
        assert words in complaints
