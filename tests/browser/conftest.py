"""One Airflow and one Chromium, for all tests here."""

from __future__ import annotations

import pytest

from scripts.airflow_env import ROOT, home_of
from tests.browser.chromium import Chromium, programs
from tests.browser.messages import fill_flights, fill_hostile
from tests.browser.site import Run, Site, site_in

#: Pictures of the pages go here.
SCREENS = ROOT / "build" / "screens"


@pytest.fixture(scope="session")
def site():
    """A real Airflow with users."""
    if programs() is None:
        pytest.skip("no Chromium and chromedriver on PATH: `make test-browser` sees to that")
    with site_in(home_of(ROOT, "airflow-browser")) as made:
        # They run while the first tests look at something else.
        for name in ("letters", "secret"):
            fill_hostile(made, name)
            made.trigger(name)
        yield made


@pytest.fixture(scope="session")
def _chromium(site, tmp_path_factory):
    result = programs()
    assert result is not None
    browser = Chromium(site.url, *result, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.quit()


@pytest.fixture
def browser(_chromium, request):
    """A browser without a login; a test that fails leaves a picture."""
    _chromium.fresh()
    failed_before = request.session.testsfailed
    yield _chromium
    if request.session.testsfailed > failed_before:
        _chromium.picture(SCREENS / "failed" / f"{request.node.name}.png")


@pytest.fixture
def as_admin(browser, site):
    """A browser whose user may do everything."""
    browser.log_in(site.token("admin"))
    return browser


@pytest.fixture
def as_viewer(browser, site):
    """A browser whose user may read, and nothing else."""
    browser.log_in(site.token("viewer"))
    return browser


@pytest.fixture(scope="session")
def screens():
    """Where pictures of pages go."""
    return SCREENS


@pytest.fixture(scope="session")
def letters(site):
    """A finished run whose messages were hostile."""
    return _first_run(site, "letters")


@pytest.fixture(scope="session")
def secret(site):
    """A finished run of a DAG that only the administrator may see."""
    return _first_run(site, "secret")


@pytest.fixture(scope="session")
def demo(site):
    """A finished run of the demo: the one that `test_demo` looks at, or one of its own."""
    if not site.runs("flights"):
        fill_flights(site)
        site.trigger("flights")
    return _first_run(site, "flights")


def _first_run(site: Site, dag_id: str) -> Run:
    run = site.runs(dag_id)[0]
    run.wait()
    return run
