"""Every route there is: who gets in, what hostile addresses come to, and that none leads away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from fastapi.routing import APIRoute
from starlette.routing import Mount

from airflow_broadway.plugin.app import create_app
from tests.unit.plugin.site import Site
from tests.unit.plugin.test_dead_letters import Command, command, letter, listed, runs

__all__ = ["command"]

#: Of what a viewer may read, these routes tell more: a payload.
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
    """A method, and a path with each of its ids in braces."""

    method: str
    path: str

    def of(self, **ids: str | bytes) -> str:
        """Its address, for these ids; any other is ``1``."""
        names = re.findall(r"{(\w+)(?::path)?}", self.path)
        found = self.path.replace(":path}", "}")
        return "/broadway" + found.format(
            **{name: quote(ids.get(name, "1"), safe="") for name in names}
        )


def requests() -> Iterator[Request]:
    for route in create_app().routes:
        if isinstance(route, APIRoute):
            for method in sorted(route.methods):
                yield Request(method, route.path)


REQUESTS = sorted(requests())


def named(request: Request) -> str:
    return f"{request.method} {request.path}"


def test_there_is_nothing_but_guarded_routes_and_static_files() -> None:
    others = [each for each in create_app().routes if not isinstance(each, APIRoute)]

    assert [(type(each), getattr(each, "path", "")) for each in others] == [(Mount, "/static")]


@pytest.mark.parametrize("request_", REQUESTS, ids=named)
def test_nobody_gets_anywhere_without_being_logged_in(site: Site, request_: Request) -> None:
    answer = site.browser().request(request_.method, request_.of())

    assert answer.status_code == 401
    assert "You are not logged in" in answer.text


@pytest.mark.parametrize("request_", REQUESTS, ids=named)
def test_a_viewer_reads_and_no_more(site: Site, command: Command, request_: Request) -> None:
    # Given a request of the page's own, with the token that the viewer was given
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
def test_of_a_dag_that_a_user_may_not_read_nothing_is_told(
    site: Site, command: Command, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given somebody who may do everything, but not with this Dag
    asked = SimpleAuthManager.is_authorized_dag

    def not_this(self: SimpleAuthManager, *, details: Any = None, **others: Any) -> bool:
        if details is not None and details.id == "letters_unit":
            return False
        return asked(self, details=details, **others)

    monkeypatch.setattr(SimpleAuthManager, "is_authorized_dag", not_this)
    browser = site.browser("ADMIN")

    address = request_.of(dag_id="letters_unit", pipeline="Orders", run_id="manual__1")
    answer = browser.request(request_.method, address)

    if "{dag_id}" in request_.path:
        assert answer.status_code == 403
        assert command.asked == []
    assert "Orders" not in answer.text


@pytest.mark.parametrize("request_", REQUESTS, ids=named)
def test_hostile_ids_are_no_path_no_markup_no_header_and_no_way_out(
    site: Site, command: Command, request_: Request
) -> None:
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
def test_nobody_is_sent_where_a_form_says(
    site: Site, command: Command, action: str, confirmed: str
) -> None:
    command.answers |= {each: {"requeued": 1, "deleted": 1} for each in ("requeue", "delete")}
    for moved in command.answers.values():
        moved |= {"unknown": [], "refused": {}}
    command.answers["list"] = listed(letter())
    page = "/broadway/dags/letters_unit/pipelines/Orders/dead-letters"
    away = "https://evil.example/"

    browser = site.browser("USER", follow_redirects=False)
    browser.headers["referer"] = away
    answer = browser.form(
        page,
        f"{page}/{action}?next={away}&to={away}",
        scope="all",
        confirmed=confirmed,
        next=away,
        redirect=away,
    )

    assert answer.status_code == 200
    assert "location" not in answer.headers
    assert "evil.example" not in answer.text
    assert len(runs()) == (1 if confirmed else 0)


def test_the_page_for_who_is_not_logged_in_leads_back_here_and_nowhere_else(site: Site) -> None:
    answer = site.browser().get("/broadway/?next=https://evil.example/")

    [login] = re.findall(r'class="button" href="([^"]*)"', answer.text)
    assert re.match(r"(http://airflow\.test)?/auth/", login)
    [back] = re.findall(r"next=([^&]*)", login)
    assert back.startswith(quote("http://airflow.test/broadway/", safe=""))
