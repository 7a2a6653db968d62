"""Every route: access, hostile addresses, and no redirect elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import quote

import pytest
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from fastapi.routing import APIRoute
from starlette.routing import Mount

from airflow_broadway.plugin.app import create_app
from tests.unit.plugin.test_dead_letters import command, letter, listed, runs

__all__ = ["command"]

#: Routes that show a payload, which a viewer may not read.
PAYLOADS = {"/dags/{dag_id}/pipelines/{pipeline}/dead-letters/{message_id:path}"}

#: Ids as an attacker would have them.
HOSTILE = (
    "..",
    "../../../../etc/passwd",
    "..\\..\\secret",
    "%2e%2e%2f",
    "a\0b",
    "a\r\nSet-Cookie: owned=1\r\n\r\n<script>",
    "javascript:alert(1)",
    "//evil.example/",
    "http://evil.example",
    "\u202egnp.exe\u2066",
    "\udcff".encode("utf-8", "surrogateescape"),
    "{{ 7*7 }}",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "x" * 5_000,
)


class Request(NamedTuple):
    """A method, and a path with its ids in braces."""

    method: str
    path: str

    def of(self, **ids: str | bytes) -> str:
        """Its address, for these ids; any other is ``1``."""
        names = re.findall(r"{(\w+)(?::path)?}", self.path)
        quoted = {name: quote(ids.get(name, "1"), safe="") for name in names}
        return "/broadway" + self.path.replace(":path}", "}").format(**quoted)


def requests() -> Iterator[Request]:
    for route in create_app().routes:
        if isinstance(route, APIRoute):
            for method in sorted(route.methods):
                yield Request(method, route.path)


REQUESTS = sorted(requests())


def named(request: Request) -> str:
    return f"{request.method} {request.path}"


def test_all_routes_are_guarded_or_static():
    others = [route for route in create_app().routes if not isinstance(route, APIRoute)]

    assert [(type(other), getattr(other, "path", "")) for other in others] == [(Mount, "/static")]


@pytest.mark.parametrize("request_", REQUESTS, ids=named)
def test_no_route_works_without_login(site, request_):
    answer = site.browser().request(request_.method, request_.of())

    assert answer.status_code == 401
    assert "You are not logged in" in answer.text


@pytest.mark.parametrize("request_", REQUESTS, ids=named)
def test_viewer_may_only_read(site, command, request_):
    # Given a request of the page, with the viewer's token
    command.answers["list"] = listed(letter())
    browser = site.browser("VIEWER")
    ids = {"dag_id": "letters_unit", "pipeline": "Orders"}
    page = "/broadway/dags/letters_unit/pipelines/Orders/dead-letters"

    if request_.method == "GET":
        answer = browser.get(request_.of(**ids))
        allowed = request_.path not in PAYLOADS
    else:
        answer = browser.form(page, request_.of(**ids), scope="all", confirmed="yes")
        allowed = False

    assert (answer.status_code != 403) == allowed, answer.text
    assert runs() == []


@pytest.mark.parametrize("request_", REQUESTS, ids=named)
def test_unreadable_dag_reveals_nothing(site, command, request_, monkeypatch):
    # Given a user with all rights but those on this Dag
    allowed = SimpleAuthManager.is_authorized_dag

    def not_this(self, *, details=None, **others):
        if details is not None and details.id == "letters_unit":
            return False
        return allowed(self, details=details, **others)

    monkeypatch.setattr(SimpleAuthManager, "is_authorized_dag", not_this)
    browser = site.browser("ADMIN")

    address = request_.of(dag_id="letters_unit", pipeline="Orders", run_id="manual__1")
    answer = browser.request(request_.method, address)

    if "{dag_id}" in request_.path:
        assert answer.status_code == 403
        assert command.requests == []
    assert "Orders" not in answer.text


@pytest.mark.parametrize("request_", REQUESTS, ids=named)
def test_hostile_ids_are_no_path_markup_header_or_link(site, command, request_):
    command.answers |= {"show": letter(body="{}"), "list": listed(letter())}
    browser = site.browser("USER", follow_redirects=False)
    for hostile in HOSTILE:
        for name in re.findall(r"{(\w+)", request_.path) or ["none"]:
            address = request_.of(**{"dag_id": "letters_unit", "pipeline": "Orders", name: hostile})
            query = quote(hostile, safe="")
            answer = browser.request(
                request_.method,
                f"{address}?q={query}&next={query}&reason={query}&batcher={query}&pipeline={query}",
                headers={"referer": "http://evil.example/", "sec-fetch-site": "same-origin"},
            )

            assert answer.status_code in (200, 403, 404, 422), (answer.status_code, hostile)
            assert not {"location", "refresh"} & set(answer.headers)
            assert "owned" not in str(answer.headers)
            assert re.findall(r"<script>|<img|Traceback", answer.text) == []
            leads = re.findall(r'(?:href|action|src|data-live)="([^"]*)"', answer.text)
            assert [to for to in leads if not to.startswith(("/", "?", "#"))] == []
            assert [to for to in leads if to.startswith("//")] == []


@pytest.mark.parametrize("action", ["requeue", "delete"])
@pytest.mark.parametrize("confirmed", ["yes", ""])
def test_form_fields_redirect_nowhere(site, command, action, confirmed):
    moved = {"requeued": 1, "deleted": 1, "unknown": [], "refused": {}}
    command.answers |= {"requeue": moved, "delete": moved, "list": listed(letter())}
    page = "/broadway/dags/letters_unit/pipelines/Orders/dead-letters"
    away = "https://evil.example/"

    browser = site.browser("USER", follow_redirects=False)
    browser.headers["referer"] = away
    fields = {"scope": "all", "confirmed": confirmed, "next": away, "redirect": away}
    answer = browser.form(page, f"{page}/{action}?next={away}&to={away}", **fields)

    assert answer.status_code == 200
    assert "location" not in answer.headers
    assert "evil.example" not in answer.text
    assert len(runs()) == (1 if confirmed else 0)


def test_login_link_leads_back_here_only(site):
    answer = site.browser().get("/broadway/?next=https://evil.example/")

    [login] = re.findall(r'class="button" href="([^"]*)"', answer.text)
    assert re.match(r"(http://airflow\.test)?/auth/", login)
    [back] = re.findall(r"next=([^&]*)", login)
    assert back.startswith(quote("http://airflow.test/broadway/", safe=""))
