"""Senders of messages and names get no power over viewers of the pages."""

from __future__ import annotations

import urllib.parse

import pytest

from tests.browser.messages import HOSTILE, ID

pytestmark = [pytest.mark.browser, pytest.mark.airflow]

LETTERS = "/broadway/dags/letters/pipelines/Letters/dead-letters"

#: What a run's page is asked to show of its batches.
FILTERS = ("batcher", "state", "sort")

#: Each page, below the run's own or as it is.
PAGES = (
    "{run}",
    "{run}?sort=key&desc=1",
    "{run}?pipeline=Letters&" + urllib.parse.urlencode(dict.fromkeys(FILTERS, HOSTILE[1])),
    "{run}/message?q=" + urllib.parse.quote(f"{ID}-2"),
    "{run}/message?q=" + urllib.parse.quote(HOSTILE[0]),
    LETTERS,
    LETTERS + "?reason=" + urllib.parse.quote(HOSTILE[1]),
    LETTERS + "/" + urllib.parse.quote(f"{ID}-17", safe=""),
    LETTERS + "/" + urllib.parse.quote(f"{ID}-18", safe="") + "?as=hex",
    "/broadway/?ask=true",
    "/broadway/?q=" + urllib.parse.quote(HOSTILE[1]),
)


@pytest.mark.parametrize("page", PAGES)
def test_message_contents_are_escaped(as_admin, letters, page):
    # When a page shows messages that attack it
    as_admin.open(page.format(run=letters.page))
    as_admin.find("main")

    # Then nothing of them has run, nor was it tried, and nothing else was fetched or left for
    assert as_admin.run("return window.owned ?? null") is None
    assert as_admin.complaints() == []
    assert as_admin.driver.current_url.startswith(as_admin.site)
    assert as_admin.all("main iframe, main script, main img, main base, main meta") == []
    assert (
        as_admin.run(
            "return [...document.querySelectorAll('*')].flatMap((e) => [...e.attributes]"
            ".filter((a) => a.name.startsWith('on') || /^\\\\s*javascript:/i.test(a.value))"
            ".map((a) => a.name + '=' + a.value))"
        )
        == []
    )


@pytest.mark.parametrize("page", PAGES)
def test_pages_send_security_headers(site, letters, page):
    headers = site.get(page.format(run=letters.page), user="admin").headers

    policy = {
        name: values
        for name, *values in (
            part.split() for part in headers["Content-Security-Policy"].split(";")
        )
    }
    assert policy["default-src"] == ["'none'"]
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
    assert policy["frame-ancestors"] == policy["form-action"] == ["'self'"]
    assert policy["base-uri"] == ["'none'"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    [
        "/broadway/dags/{dag}/runs/..%2F..%2F..%2F..%2Fetc%2Fpasswd",
        "/broadway/dags/{dag}/runs/../../../../../etc/passwd",
        "/broadway/dags/{dag}/runs/..",
        "/broadway/dags/{dag}/runs/%2e%2e",
        "/broadway/dags/{dag}/runs/%00",
        "/broadway/dags/{dag}/runs/..%5C..%5Csecret",
        "/broadway/dags/..%2Fsecret/runs/{secret}",
        "/broadway/dags/{dag}%2F..%2Fsecret/runs/{secret}",
        "/broadway/dags/./secret/runs/{secret}",
        "/broadway/dags/{dag}/runs/..%2F..%2Fsecret%2F{secret}",
        "/broadway/dags/{dag}/../secret/runs/{secret}",
        "/broadway/dags/%73ecret/runs/{secret}",
        "/broadway//dags/secret/runs/{secret}",
        "/broadway/static/../access.py",
        "/broadway/static/..%2Faccess.py",
        "/broadway/static/%2e%2e/access.py",
        "/broadway/static//etc/passwd",
    ],
)
def test_path_traversal_is_refused(site, letters, secret, path):
    run_id = secret.page.rpartition("/")[2]

    answer = site.get(path.format(dag="letters", secret=run_id), user="viewer")

    assert answer.status_code in (200, 403, 404, 422)
    # At most a page that has nothing to show, with what was asked for as its title.
    assert answer.status_code != 200 or "<section" not in answer.text
    for words in ("root:", "import ", "Traceback", "haystack", "acked"):
        assert words not in answer.text


def test_a_malformed_request_shows_no_stack_trace(site, letters):
    for path in (
        "?page=x",
        "?page=-1",
        "?page=99999999999999999999",
        "?sort=%00",
        "?q=" + "x" * 9_000,
    ):
        for below in ("", "/batches", "/message", "/live"):
            answer = site.get(letters.page + below + path, user="admin")
            assert answer.status_code < 500, (below, path, answer.text)
            assert "Traceback" not in answer.text
            assert "Content-Security-Policy" in answer.headers
