"""Rights in the pages: Airflow's auth manager decides, and forged requests fail."""

from __future__ import annotations

import shutil
import time
from unittest import mock

import pytest
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.models.dag import DagModel
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.plugin import access
from airflow_broadway.plugin.access import EDITS_RUNS, READS_RUNS, MayEdit
from airflow_broadway.plugin.app import create_app
from airflow_broadway.plugin.declared import RunTasks
from airflow_broadway.plugin.pages import run as run_page
from airflow_broadway.plugin.render import page, version, web
from tests.unit.plugin.site import Site

RUN = "/broadway/dags/d/runs/manual__2026-01-01T00:00:00+00:00"


@pytest.fixture
def acting(site, monkeypatch):
    """The site with a page more: one that acts."""
    router = APIRouter(prefix="/dags/{dag_id}/acting", dependencies=[READS_RUNS])

    @router.get("")
    def show(request: Request, dag_id: str, may_edit: MayEdit) -> object:
        return page(request, "trouble.html", title="t", sentence=f"edits: {may_edit}", login=None)

    @router.post("", dependencies=[EDITS_RUNS])
    def act(dag_id):
        return {"acted": dag_id}

    @router.api_route("", methods=["PUT", "PATCH", "DELETE"])
    def change(dag_id):
        return {"changed": dag_id}

    @router.get("/broken")
    def fail(dag_id):
        raise ZeroDivisionError("a secret of the code")

    @router.get("/refused")
    def refuse(dag_id):
        raise RequestRefused("there is no <b>run</b>")

    app = create_app()
    app.include_router(router)
    [mount] = [route for route in site.app.routes if getattr(route, "path", "") == "/broadway"]
    monkeypatch.setattr(mount, "app", app)
    return site


def test_anonymous_gets_401_on_every_page_with_a_login_link(site):
    answer = site.browser().get(RUN)

    assert answer.status_code == 401
    assert "You are not logged in" in answer.text
    assert "/auth/" in answer.text


def test_viewer_sees_the_page(site, monkeypatch):
    known = RunTasks(state="success")
    monkeypatch.setattr(run_page, "tasks_of_run", lambda dag_id, run_id: known)
    answer = site.browser("VIEWER").get(RUN)

    assert answer.status_code == 200
    assert "manual__2026-01-01T00:00:00+00:00" in answer.text


def test_foreign_cookie_is_refused(site):
    browser = site.browser()
    browser.cookies.set("_token", "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9.")

    assert browser.get(RUN).status_code in (401, 403)


def test_only_static_files_are_public(site):
    anonymous = site.browser()

    assert anonymous.get("/broadway/static/broadway.css").status_code == 200
    assert anonymous.get("/broadway/static/../app.py").status_code in (401, 404)
    for path in ("/broadway/docs", "/broadway/openapi.json", "/broadway/redoc"):
        assert anonymous.get(path).status_code == 404


def test_every_route_checks_user_rights_and_csrf():
    routes = [route for route in create_app().routes if isinstance(route, APIRoute)]

    calls_of = {
        route.path: {
            dependency.call for dependency in route.dependant.dependencies if dependency.call
        }
        for route in routes
    }

    assert calls_of
    guards = {guard.dependency for guard in access.GUARDS}
    for path, calls in calls_of.items():
        assert guards <= calls, path
        # A page of all Dags shows those that the user may read.
        if "{dag_id}" in path:
            assert {READS_RUNS.dependency, EDITS_RUNS.dependency} & calls, path


def test_template_knows_who_may_edit(acting):
    texts = {
        role: acting.browser(role).get("/broadway/dags/d/acting").text
        for role in ("VIEWER", "USER")
    }

    assert "edits: False" in texts["VIEWER"]
    assert "edits: True" in texts["USER"]


def token_for(site: Site, role: str, *, browser: str = "b", at: float | None = None) -> str:
    user = SimpleAuthManagerUser(username=role.lower(), role=role)
    with mock.patch("time.time", return_value=time.time() if at is None else at):
        return access.make_token(user, browser)


def post(site: Site, role: str, token: str | None, **headers: str) -> int:
    browser = site.browser(role)
    browser.cookies.set(access.BROWSER_COOKIE, "b")
    data = {} if token is None else {"csrf": token}
    answer = browser.post("/broadway/dags/d/acting", data=data, headers=headers)
    return int(answer.status_code)


def test_viewer_post_is_403_even_with_a_token(acting):
    assert post(acting, "VIEWER", token_for(acting, "VIEWER")) == 403


def test_user_acts_only_with_an_own_token(acting):
    good = token_for(acting, "USER")

    assert post(acting, "USER", good) == 200
    # The last character has bits that Base64 ignores.
    changed = good[:-2] + ("0" if good[-2] != "0" else "1") + good[-1]
    forged = [None, changed, "9" * 5000, "ü.ü", "²²².a"]
    foreign = [token_for(acting, "ADMIN"), token_for(acting, "USER", browser="c")]
    assert {post(acting, "USER", token) for token in (*forged, *foreign)} == {403}
    assert post(acting, "USER", good, **{access.CSRF_HEADER: ""}) == 403
    assert acting.browser("USER").post("/broadway/dags/d/acting").status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_each_changing_method_needs_a_token(acting, method):
    assert acting.browser("ADMIN").request(method, "/broadway/dags/d/acting").status_code == 403


def test_token_is_bound_to_each_part_and_the_secret(site, monkeypatch):
    def token(username, browser, at):
        user = SimpleAuthManagerUser(username=username, role="USER")
        with mock.patch("time.time", return_value=at):
            return access.make_token(user, browser).rpartition(".")[2]

    tokens = [token("ab", "c1", 2), token("a", "bc1", 2), token("ab", "c1", 3), token("b", "c1", 2)]
    monkeypatch.setenv("AIRFLOW__API__SECRET_KEY", "another")
    tokens.append(token("ab", "c1", 2))

    assert len(set(tokens)) == 5


def test_browser_cookie_is_http_only_and_same_site():
    def cookie(scheme, root, sent=""):
        headers = [(b"cookie", f"{access.BROWSER_COOKIE}={sent}".encode())] if sent else []
        request = Request(
            {"type": "http", "scheme": scheme, "root_path": root, "headers": headers, "path": "/"}
            | {"server": ("airflow.test", 443), "query_string": b""}
        )
        request.state.broadway_user = SimpleAuthManagerUser(username="u", role="USER")
        assert access.csrf_of(request)
        response = Response()
        access.remember_browser(request, response)
        return response.headers.get("set-cookie")

    plain, other = cookie("http", "/broadway"), cookie("http", "/broadway")
    secure = cookie("https", "/broadway")
    assert plain is not None
    assert secure is not None
    assert plain.partition("; ")[2] == "HttpOnly; Path=/broadway; SameSite=strict"
    assert secure.partition("; ")[2] == "HttpOnly; Path=/broadway; SameSite=strict; Secure"
    assert len({plain, other, secure}) == 3
    assert cookie("http", "/broadway", sent="known") is None


def test_dags_are_readable_if_their_runs_are(monkeypatch):
    class Manager:
        """Lets the user see two Dags, and read the runs of one."""

        def get_authorized_dag_ids(self, *, user):
            return {"mine", "seen", "elsewhere"}

        def is_authorized_dag(self, *, method, access_entity, details, user):
            request = (method, access_entity, details.id, details.team_name)
            return request == ("GET", DagAccessEntity.RUN, "mine", "blue")

    monkeypatch.setattr(access, "get_auth_manager", Manager)
    teams = {"mine": "blue", "seen": "blue", "hidden": "blue"}
    monkeypatch.setattr(DagModel, "get_dag_id_to_team_name_mapping", lambda dag_ids: teams)
    user = SimpleAuthManagerUser(username="u", role="USER")

    assert access.readable_dags(user, ["mine", "seen", "hidden"]) == {"mine"}


def test_right_to_edit_is_checked_for_the_team_of_the_dag(monkeypatch):
    class Manager:
        def is_authorized_dag(self, *, method, access_entity, details, user):
            request = (method, access_entity, details.id, details.team_name)
            return request == ("PUT", DagAccessEntity.RUN, "mine", "blue")

    monkeypatch.setattr(access, "get_auth_manager", Manager)
    monkeypatch.setattr(DagModel, "get_team_name", {"mine": "blue"}.get)
    user = SimpleAuthManagerUser(username="u", role="USER")

    assert access.may_edit("mine", user)
    assert not access.may_edit("other", user)


def test_token_expires(acting):
    now = time.time()
    ages = [access.TOKEN_SECONDS - 60, access.TOKEN_SECONDS + 60, -60, 11 * 3600, 13 * 3600]

    answers = [post(acting, "USER", token_for(acting, "USER", at=now - age)) for age in ages]

    assert answers == [200, 403, 403, 200, 403]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://airflow.test"}, 200),
        ({"origin": "http://evil.test"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
    ],
)
def test_cross_site_request_is_refused_even_with_a_token(acting, headers, status):
    assert post(acting, "USER", token_for(acting, "USER"), **headers) == status


def test_token_in_the_header_is_accepted(acting):
    header = {access.CSRF_HEADER: token_for(acting, "USER")}

    assert post(acting, "USER", None, **header) == 200


def test_pages_carry_security_headers(site):
    for path in (RUN, "/broadway/nothing", "/broadway/static/broadway.js"):
        headers = site.browser("VIEWER").get(path).headers

        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"


def test_only_current_static_files_are_cached(site):
    browser = site.browser("VIEWER")
    file = "/broadway/static/broadway.js"
    now = version("broadway.js")

    kept = {
        path: "immutable" in browser.get(path).headers["cache-control"]
        for path in (
            f"{file}?v={now}",
            f"{file}?v=another",
            f"/broadway/static/nothing.js?v={now}",
            f"/broadway/dags/static/runs/broadway.js?v={now}",
        )
    }

    assert list(kept.values()) == [True, False, False, False]


def test_link_is_http_or_none():
    bad = ("javascript:alert(1)", "JavaScript:alert(1)", "data:text/html,x", "//evil", "http://[")

    assert web("https://a/b?c") == "https://a/b?c"
    assert [address for address in (*bad, "", None) if web(address)] == []


def test_missing_staging_root_is_explained(site):
    shutil.rmtree(site.staging)

    answer = site.browser("VIEWER").get(RUN)

    assert answer.status_code == 503
    assert f"The staging folder file://{site.staging} does not exist" in answer.text
    assert "on the API server: either no run has begun yet" in answer.text
    assert "then set `[broadway] staging`, here and there" in answer.text
    assert "--staging" not in answer.text
    assert "Traceback" not in answer.text


def test_internal_error_page_has_no_traceback(acting):
    answer = acting.browser("VIEWER").get("/broadway/dags/d/acting/broken")

    assert answer.status_code == 500
    assert "Something is broken here" in answer.text
    assert "ZeroDivision" not in answer.text
    assert "secret" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_refusal_is_escaped(acting):
    answer = acting.browser("VIEWER").get("/broadway/dags/d/acting/refused")

    assert answer.status_code == 404
    assert "there is no &lt;b&gt;run&lt;/b&gt;" in answer.text
