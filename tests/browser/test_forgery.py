"""What another site's page can do to a user who visits it: nothing."""

from __future__ import annotations

import pytest

from tests.browser.chromium import Chromium
from tests.browser.elsewhere import another_site
from tests.browser.site import Run, Site

pytestmark = [pytest.mark.browser, pytest.mark.airflow]


def test_another_site_cannot_show_our_pages_in_its_own(
    as_admin: Chromium, site: Site, letters: Run
) -> None:
    frame = f'<iframe src="{site.url}{letters.page}" width=900 height=600></iframe>'

    with another_site(frame) as (address, _):
        as_admin.driver.get(address)
        as_admin.driver.switch_to.frame(as_admin.find("iframe"))
        framed = as_admin.driver.page_source
        as_admin.driver.switch_to.default_content()
        complaints = " ".join(as_admin.complaints())

    assert letters.run_id not in framed
    assert "frame-ancestors" in complaints
