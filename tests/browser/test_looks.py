"""Pages that can be read and used: in light and dark, on a phone, by keyboard and screen reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import PHONE, Chromium
from tests.browser.looks import complaints_of_looks, not_reached_by_tab, too_wide_on_a_phone
from tests.browser.site import Run

pytestmark = [pytest.mark.browser, pytest.mark.airflow]

#: Each page, by the name of its pictures.
PAGES = {"run": "{run}"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read_and_used_by_everyone(
    as_admin: Chromium, letters: Run, screens: Path, name: str
) -> None:
    as_admin.open(PAGES[name].format(run=letters.page))

    complaints = []
    for scheme in ("light", "dark"):
        as_admin.colours(scheme)
        as_admin.picture(screens / f"{name}-{scheme}.png", whole=True)
        complaints += [f"{scheme}: {each}" for each in complaints_of_looks(as_admin)]
    complaints += not_reached_by_tab(as_admin)
    complaints += too_wide_on_a_phone(as_admin)
    as_admin.picture(screens / f"{name}-phone.png", whole=True)
    as_admin.size(PHONE)

    assert complaints == []
