"""Who may see and do what in the pages: Airflow's auth manager is asked; forged requests fail."""

from __future__ import annotations

import shutil
import time
from unittest import mock

import pytest
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
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
def acting(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The site with a page more: one that acts."""
    router = APIRouter(prefix="/dags/{dag_id}/acting", dependencies=[READS_RUNS])

    @router.get("")
    def show(request: Request, dag_id: str, may_edit: MayEdit) -> object:
        return page(request, "trouble.html", title="t", sentence=f"edits: {may_edit}", login=None)

    @router.post("", dependencies=[EDITS_RUNS])
    def act(dag_id: str) -> dict[str, str]:
        return {"acted": dag_id}

    @router.api_route("", methods=["PUT", "PATCH", "DELETE"])
    def change(dag_id: str) -> dict[str, str]:
        return {"changed": dag_id}

    @router.get("/broken")
    def fail(dag_id: str) -> None:
        raise ZeroDivisionError("a secret of the code")

    @router.get("/refused")
    def refuse(dag_id: str) -> None:
        raise RequestRefused("there is no <b>run</b>")

    app = create_app()
    app.include_router(router)
    [mount] = [each for each in site.app.routes if getattr(each, "path", "") == "/broadway"]
    monkeypatch.setattr(mount, "app", app)
    return site


def test_anonymous_gets_401_on_every_page_and_a_link_to_log_in(site: Site) -> None:
    answer = site.browser().get(RUN)

    assert answer.status_code == 401
    assert "You are not logged in" in answer.text
    assert "/auth/" in answer.text


def test_a_viewer_sees_the_page(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    known = RunTasks(state="success")
    monkeypatch.setattr(run_page, "tasks_of_run", lambda dag_id, run_id: known)
    answer = site.browser("VIEWER").get(RUN)

    assert answer.status_code == 200
    assert "manual__2026-01-01T00:00:00+00:00" in answer.text


def test_a_cookie_that_is_not_airflows_is_refused(site: Site) -> None:
    browser = site.browser()
    browser.cookies.set("_token", "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9.")

    assert browser.get(RUN).status_code in (401, 403)


def test_static_files_are_for_everyone_and_nothing_else_is(site: Site) -> None:
    anonymous = site.browser()

    assert anonymous.get("/broadway/static/broadway.css").status_code == 200
    assert anonymous.get("/broadway/static/../app.py").status_code in (401, 404)
    for path in ("/broadway/docs", "/broadway/openapi.json", "/broadway/redoc"):
        assert anonymous.get(path).status_code == 404


def test_every_route_asks_who_it_is_and_whether_the_request_is_forged() -> None:
    routes = [each for each in create_app().routes if isinstance(each, APIRoute)]

    asked = {
        route.path: {each.call for each in route.dependant.dependencies if each.call}
        for route in routes
    }

    assert asked
    guards = {each.dependency for each in access.GUARDS}
    for path, calls in asked.items():
        assert guards <= calls, path
        # A page of no one Dag chooses what it shows by the user's rights.
        if "{dag_id}" in path:
            assert {READS_RUNS.dependency, EDITS_RUNS.dependency} & calls, path


def test_who_may_edit_is_told_so(acting: Site) -> None:
    said = {
        role: acting.browser(role).get("/broadway/dags/d/acting").text
        for role in ("VIEWER", "USER")
    }

    assert "edits: False" in said["VIEWER"]
    assert "edits: True" in said["USER"]


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


def test_a_viewers_post_is_403_even_with_a_token(acting: Site) -> None:
    assert post(acting, "VIEWER", token_for(acting, "VIEWER")) == 403


def test_a_user_acts_with_a_token_and_not_without_or_with_anothers(acting: Site) -> None:
    good = token_for(acting, "USER")

    assert post(acting, "USER", good) == 200
    assert post(acting, "USER", None) == 403
    assert post(acting, "USER", good[:-2] + ("0" if good[-2] != "0" else "1") + good[-1]) == 403
    assert post(acting, "USER", token_for(acting, "ADMIN")) == 403
    assert post(acting, "USER", token_for(acting, "USER", browser="c")) == 403
    assert post(acting, "USER", "9" * 5000) == 403
    assert post(acting, "USER", "ü.ü") == 403
    assert post(acting, "USER", "²²².a") == 403
    assert post(acting, "USER", good, **{access.CSRF_HEADER: ""}) == 403
    assert acting.browser("USER").post("/broadway/dags/d/acting").status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_each_method_that_changes_something_needs_a_token(acting: Site, method: str) -> None:
    assert acting.browser("ADMIN").request(method, "/broadway/dags/d/acting").status_code == 403


def test_a_token_is_bound_to_each_of_its_parts_and_to_the_secret(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def token(username: str, browser: str, at: int) -> str:
        user = SimpleAuthManagerUser(username=username, role="USER")
        with mock.patch("time.time", return_value=at):
            return access.make_token(user, browser).rpartition(".")[2]

    tokens = [token("ab", "c1", 2), token("a", "bc1", 2), token("ab", "c1", 3), token("b", "c1", 2)]
    monkeypatch.setenv("AIRFLOW__API__SECRET_KEY", "another")
    tokens.append(token("ab", "c1", 2))

    assert len(set(tokens)) == 5


def test_the_cookie_of_a_browser_is_out_of_reach_of_scripts_and_of_other_sites() -> None:
    def cookie(scheme: str, root: str, sent: str = "") -> str | None:
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


def test_only_dags_whose_runs_may_be_read_are_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        """Lets the user see two Dags, and read the runs of one."""

        def get_authorized_dag_ids(self, *, user: object) -> set[str]:
            return {"mine", "seen", "elsewhere"}

        def is_authorized_dag(
            self, *, method: str, access_entity: object, details: DagDetails, user: object
        ) -> bool:
            asked = (method, access_entity, details.id, details.team_name)
            return asked == ("GET", DagAccessEntity.RUN, "mine", "blue")

    monkeypatch.setattr(access, "get_auth_manager", Manager)
    teams = {"mine": "blue", "seen": "blue", "hidden": "blue"}
    monkeypatch.setattr(DagModel, "get_dag_id_to_team_name_mapping", lambda dag_ids: teams)
    user = SimpleAuthManagerUser(username="u", role="USER")

    assert access.readable_dags(user, ["mine", "seen", "hidden"]) == {"mine"}


def test_the_right_to_edit_is_asked_of_the_team_of_the_dag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Manager:
        def is_authorized_dag(
            self, *, method: str, access_entity: object, details: DagDetails, user: object
        ) -> bool:
            asked = (method, access_entity, details.id, details.team_name)
            return asked == ("PUT", DagAccessEntity.RUN, "mine", "blue")

    monkeypatch.setattr(access, "get_auth_manager", Manager)
    monkeypatch.setattr(DagModel, "get_team_name", {"mine": "blue"}.get)
    user = SimpleAuthManagerUser(username="u", role="USER")

    assert access.may_edit("mine", user)
    assert not access.may_edit("other", user)


def test_a_token_has_its_time(acting: Site) -> None:
    old = time.time() - access.TOKEN_SECONDS

    assert post(acting, "USER", token_for(acting, "USER", at=old + 60)) == 200
    assert post(acting, "USER", token_for(acting, "USER", at=old - 60)) == 403
    assert post(acting, "USER", token_for(acting, "USER", at=time.time() + 60)) == 403
    assert post(acting, "USER", token_for(acting, "USER", at=time.time() - 11 * 3600)) == 200
    assert post(acting, "USER", token_for(acting, "USER", at=time.time() - 13 * 3600)) == 403


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
def test_a_request_of_another_site_is_refused_even_with_a_token(
    acting: Site, headers: dict[str, str], status: int
) -> None:
    assert post(acting, "USER", token_for(acting, "USER"), **headers) == status


def test_a_token_in_the_header_serves_too(acting: Site) -> None:
    header = {access.CSRF_HEADER: token_for(acting, "USER")}

    assert post(acting, "USER", None, **header) == 200


def test_pages_say_what_browsers_may_do_with_them(site: Site) -> None:
    for path in (RUN, "/broadway/nothing", "/broadway/static/broadway.js"):
        headers = site.browser("VIEWER").get(path).headers

        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"


def test_only_a_static_file_of_this_release_is_kept_by_browsers(site: Site) -> None:
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


def test_a_link_is_one_of_http_or_none() -> None:
    bad = (
        "javascript:alert(1)",
        "JavaScript:alert(1)",
        "data:text/html,x",
        "//evil",
        "http://[",
        "",
    )

    assert web("https://a/b?c") == "https://a/b?c"
    assert [each for each in (*bad, None) if web(each)] == []


def test_a_staging_root_that_is_gone_is_said_in_a_sentence(site: Site) -> None:
    shutil.rmtree(site.staging)

    answer = site.browser("VIEWER").get(RUN)

    assert answer.status_code == 503
    assert f"The staging folder file://{site.staging} does not exist" in answer.text
    assert "on the API server: either no run has begun yet" in answer.text
    assert "then set `[broadway] staging`, here and there" in answer.text
    assert "--staging" not in answer.text
    assert "Traceback" not in answer.text


def test_an_error_of_ours_is_a_page_without_a_trace(acting: Site) -> None:
    answer = acting.browser("VIEWER").get("/broadway/dags/d/acting/broken")

    assert answer.status_code == 500
    assert "Something is broken here" in answer.text
    assert "ZeroDivision" not in answer.text
    assert "secret" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_what_is_refused_is_said_escaped(acting: Site) -> None:
    answer = acting.browser("VIEWER").get("/broadway/dags/d/acting/refused")

    assert answer.status_code == 404
    assert "there is no &lt;b&gt;run&lt;/b&gt;" in answer.text
