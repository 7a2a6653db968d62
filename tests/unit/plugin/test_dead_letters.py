"""The dead letters' page: its requests to a child process, its content, the right to act."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.log import Log
from airflow.sdk import DAG
from airflow.utils.session import create_session
from sqlalchemy import delete, select, update
from sqlalchemy.exc import OperationalError

from airflow_broadway import Broadway
from airflow_broadway.adapters.staging import open_store
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.plugin import access
from airflow_broadway.plugin.access import BROWSER_COOKIE, CSRF_FIELD, make_token
from airflow_broadway.plugin.children import Answer, ChildError
from airflow_broadway.plugin.pages import dead_letters
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.reports import report_backlog
from tests.unit.plugin.dags import stored_dags
from tests.unit.plugin.site import Browser, Site

PAGE = "/broadway/dags/letters_unit/pipelines/Orders/dead-letters"
EVIL = "<script>alert('x')</script>"


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path="/tmp/orders.db")

    def handle_message(self, processor: str, message: Any, context: Any) -> Any:
        return message


def letter(key: str = "m-1", **fields: Any) -> dict[str, Any]:
    return {
        "message_id": key,
        "reason": "ValueError: why",
        "stage": "process",
        "attempt": 3,
        "died_at": "2026-01-31 12:00:00+00:00",
        "enqueued_at": None,
        "generation": "g",
        "origin": "orders",
        "original_id": key,
        "properties": {},
        "bytes": 5,
        **fields,
    }


def listed(*letters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reason = {"count": len(letters), "stage": "process", "reason": "ValueError: why"}
    return {
        "place": "queue 'orders'",
        "total": len(letters),
        "matching": len(letters),
        "whole": True,
        "reasons": [reason] if letters else [],
        "other_reasons": 0,
        "letters": list(letters),
        **fields,
    }


class Command:
    """Stands for the child process: has answers by request, and records the requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {"list": listed()}

    async def ask(self, question: dict[str, Any]) -> Answer:
        self.requests.append(question)
        value = self.answers[question["ask"]]
        if isinstance(value, Exception):
            raise value
        return Answer(json.loads(json.dumps(value)), datetime(2026, 1, 31, tzinfo=UTC))


def report(site: Site, dag_id: str = "letters_unit", pipeline: str = "Orders") -> None:
    """The report of a run on its queue."""
    queues = WatchedQueues(pipeline, [SqliteProducer(queue="orders", path="/tmp/orders.db")])
    at = datetime(2026, 1, 30, 12, tzinfo=UTC)
    depth = QueueDepth(5, 0, 0, 7, 60.0)
    store = open_store(site.staging.as_uri())
    report_backlog(store, dag_id, queues, depth, at=at, by="run r1")


@pytest.fixture
def command(site, monkeypatch):
    """A Dag with a pipeline whose last run reported its queue; the page queries brokers."""
    command = Command()
    monkeypatch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "True")
    monkeypatch.setattr(dead_letters, "CHILDREN", command)
    report(site)
    with stored_dags(Orders().dag("letters_unit")):
        yield command
    with create_session() as session:
        session.execute(delete(Log).where(Log.dag_id == "letters_unit"))


def runs() -> list[DagRun]:
    with create_session() as session:
        return list(session.scalars(select(DagRun).where(DagRun.dag_id == "letters_unit")))


def letters_of_run() -> Any:
    """The choice of dead letters in the only run."""
    [run] = runs()
    return (run.conf or {})["dead_letters"]


def change_dag(**fields: Any) -> None:
    with create_session() as session:
        session.execute(update(DagModel).where(DagModel.dag_id == "letters_unit").values(**fields))


def entries() -> list[tuple[str, str, str | None, dict[str, Any]]]:
    """The audit log as event, owner, run and extra."""
    with create_session() as session:
        logs = session.scalars(select(Log).where(Log.dag_id == "letters_unit")).all()
        return [(e.event, str(e.owner), e.run_id, json.loads(e.extra or "")) for e in logs]


# ------------------------------------------------------------------------------------------- look


def test_viewer_sees_reasons_but_no_payload_or_buttons(site, command):
    command.answers["list"] = listed(letter("m-1"), letter("m/2", reason=EVIL))

    answer = site.browser("VIEWER").get(PAGE)

    assert answer.status_code == 200
    assert "m-1" in answer.text
    assert "ValueError: why" in answer.text
    assert "&lt;script&gt;" in answer.text
    assert EVIL not in answer.text
    assert "<button name=" not in answer.text
    assert 'type="checkbox"' not in answer.text
    assert f'href="{PAGE}/' not in answer.text
    [request] = command.requests
    assert request["ask"] == "list"
    assert json.loads(request["queues"])["queues"] == [
        {
            "producer": "airflow_broadway.producers.sqlite.producer:SqliteProducer",
            "options": {"queue": "orders", "path": "/tmp/orders.db"},
        }
    ]


def test_editor_has_links_and_checkboxes_per_letter(site, command):
    command.answers["list"] = listed(letter("m-1"), letter("a/b?c <d>"))

    text = site.browser("USER").get(PAGE).text

    assert f'href="{PAGE}/a%2Fb%3Fc%20%3Cd%3E"' in text
    assert text.count('name="chosen"') == 2
    assert 'name="csrf" value="' in text


def test_filter_and_page_are_requested(site, command):
    command.answers["list"] = listed(letter(), total=1000, matching=250)

    query = "?reason=-x+y&stage=batch&since=2026-01-31T12:00&until=2026-02-01T00:00:00%2B01:00"
    text = site.browser("VIEWER").get(f"{PAGE}{query}&id=m-1&page=2").text

    [request] = command.requests
    times = {"since": "2026-01-31T12:00:00+00:00", "until": "2026-01-31T23:00:00+00:00"}
    assert request["choice"] == {"ids": ["m-1"], "reason": "-x y", "stage": "batch", **times}
    assert (request["seconds"], request["limit"], request["offset"]) == (10, 100, 100)
    assert 'value="2026-01-31T23:00:00"' in text
    assert "Page 2 of 3" in text
    assert 'rel="next" href="' in text
    assert "reason=-x+y" in text.split('rel="next" href="', 1)[1].split('"', 1)[0]


def test_partially_read_list_says_so(site, command):
    command.answers["list"] = listed(letter(), total=2_000_000, matching=90_000, whole=False)

    text = site.browser("VIEWER").get(f"{PAGE}?stage=process").text

    assert "at least 90\N{NARROW NO-BREAK SPACE}000 found by the filter" in text
    assert "There are too many to read all of them" in text
    assert "of at least 900" in text


def test_unavailable_broker_is_one_sentence(site, command):
    command.answers["list"] = ChildError("RabbitMQ at mq:5672 cannot be reached <b>now</b>")

    answer = site.browser("USER").get(PAGE)

    assert answer.status_code == 503
    assert "cannot be reached &lt;b&gt;now&lt;/b&gt;." in answer.text
    assert "Try again" in answer.text

    # Hosts, files and other queues are no viewer's business
    answer = site.browser("VIEWER").get(PAGE)
    assert answer.status_code == 503
    assert "mq:5672" not in answer.text
    assert "hose who may edit the runs of this Dag see why" in answer.text


@pytest.mark.parametrize("query", ["?since=yesterday", "?until=x", "?reason=%00"])
def test_invalid_filter_is_refused(site, command, query):
    assert site.browser("VIEWER").get(PAGE + query).status_code == 422
    assert command.requests == []


@pytest.mark.parametrize("number", ["0", "-1", "x", "9" * 50])
def test_invalid_page_is_the_first(site, command, number):
    assert site.browser("VIEWER").get(f"{PAGE}?page={number}").status_code == 200
    assert command.requests[-1]["offset"] == 0


def test_unknown_pipeline_is_not_found(site, command):
    answer = site.browser("VIEWER").get(PAGE.replace("Orders", "Others"))

    assert answer.status_code == 404
    assert command.requests == []


def test_pipeline_declared_as_text_is_found_by_its_report(site, command):
    with DAG("letters_unit", schedule=None) as dag:
        BroadwayProcessorOperator(task_id="process", pipeline="no_such_shop.orders:A")
    with stored_dags(dag):
        assert site.browser("VIEWER").get(PAGE).status_code == 200
        assert site.browser("VIEWER").get(PAGE.replace("Orders", "A")).status_code == 503
        assert site.browser("VIEWER").get(PAGE.replace("Orders", "B")).status_code == 404


def test_before_the_first_run_nothing_is_known_or_requested(site, monkeypatch):
    with stored_dags(Orders().dag("letters_unit")):
        text = site.browser("VIEWER").get(PAGE).text
        assert "no run, trigger or sensor has reported it yet" in text
        monkeypatch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "True")
        answer = site.browser("USER").get(PAGE)
        assert "has reported the options of its producer yet" in answer.text


# -------------------------------------------------------------------------------------- one letter


def test_payload_is_for_editors_and_escaped(site, command):
    command.answers["show"] = letter(body=f'{{"a": "{EVIL}"}}', properties={"h": EVIL})

    assert site.browser("VIEWER").get(f"{PAGE}/m-1").status_code == 403
    assert command.requests == []
    assert entries() == []
    text = site.browser("USER").get(f"{PAGE}/m-1").text

    assert command.requests[-1]["id"] == "m-1"
    extra = {"pipeline": "Orders", "id": "m-1"}
    assert entries() == [("broadway_dead_letters_show", "user", None, extra)]
    assert EVIL not in text
    assert text.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") == 2
    assert '<strong aria-current="true">JSON</strong>' in text


def test_binary_payload_is_shown_in_the_requested_form(site, command):
    raw = base64.b64encode(b"\x00\xffab").decode()
    command.answers["show"] = letter("-m/1", body_base64=raw, bytes=9)
    browser = site.browser("USER")

    assert "00000000  00 ff 61 62</pre>" in browser.get(f"{PAGE}/-m%2F1").text
    assert command.requests[-1]["id"] == "-m/1"
    assert "\\x00\\xffab</pre>" in browser.get(f"{PAGE}/-m%2F1?as=text").text
    assert "too long to be laid out" in browser.get(f"{PAGE}/-m%2F1?as=json").text
    assert browser.get(f"{PAGE}/m-1?as=xml").status_code == 422


def test_moved_letter_is_not_found(site, command):
    command.answers["show"] = None

    answer = site.browser("USER").get(f"{PAGE}/m-1")

    assert answer.status_code == 404
    assert "m-1 is no dead letter, or no more" in answer.text


# --------------------------------------------------------------------------------------------- act


def send(browser: Browser, action: str, **fields: Any) -> Any:
    return browser.form(PAGE, f"{PAGE}/{action}", **fields)


@pytest.fixture
def user(site, command):
    """An editor's page with letters."""
    command.answers["list"] = listed(letter("m-1"), letter("m-2"), total=7, matching=5)
    return site.browser("USER")


@pytest.mark.parametrize(
    ("action", "heading"),
    [("requeue", "Requeue 2 dead letters?"), ("delete", "Delete 2 dead letters for good?")],
)
def test_marked_letters_are_moved_by_a_run_after_confirmation(user, action, heading):
    response = send(user, action, chosen=["m-1", "m-2", "m-1"], scope="marked", reason="why")
    assert (runs(), entries()) == ([], [])
    assert heading in response.text
    assert response.text.count('name="chosen"') == 2

    fields = {"chosen": ["m-1", "m-2"], "scope": "marked", "reason": "why", "confirmed": "yes"}
    answer = send(user, action, **fields)

    assert answer.status_code == 200
    letters = {"pipeline": "Orders", "action": action, "ids": ["m-1", "m-2"]}
    [run] = runs()
    assert run.conf == {"source": "dead_letters", "dead_letters": letters}
    assert (run.state, run.run_type, run.triggering_user_name) == ("queued", "manual", "user")
    assert entries() == [(f"broadway_dead_letters_{action}", "user", run.run_id, letters)]
    assert f"/dags/letters_unit/runs/{quote(run.run_id)}" in answer.text


def test_filtered_letters_are_moved_after_confirmation(user):
    response = send(user, "requeue", scope="all", stage="process")
    assert "Requeue the dead letters found?" in response.text
    assert runs() == []

    send(user, "requeue", scope="all", stage="process", confirmed="yes")
    wanted = {"pipeline": "Orders", "action": "requeue", "stage": "process"}
    assert letters_of_run() == wanted


def test_all_letters_are_moved_without_a_filter(user):
    text = send(user, "delete", scope="all").text
    assert "Deleted messages cannot be restored" in text
    assert "there were 7 as of" in text

    send(user, "delete", scope="all", confirmed="yes")
    assert letters_of_run() == {"pipeline": "Orders", "action": "delete"}


def test_nothing_marked_moves_nothing(user):
    for fields in ({"scope": "marked"}, {}, {"scope": "marked", "chosen": [""]}):
        answer = send(user, "delete", **fields, confirmed="yes")
        assert answer.status_code == 422
        assert "No letter is marked" in answer.text
    assert (runs(), entries()) == ([], [])


@pytest.mark.parametrize("action", ["requeue", "delete"])
def test_viewer_and_forged_request_move_nothing(site, command, action):
    fields = {"chosen": "m-1", "scope": "marked", "confirmed": "yes"}

    # A viewer with a valid token
    viewer = site.browser("VIEWER")
    viewer.cookies.set(BROWSER_COOKIE, "b")
    token = make_token(SimpleAuthManagerUser(username="viewer", role="VIEWER"), "b")
    for form in (fields, fields | {"confirmed": ""}):
        answer = viewer.post(f"{PAGE}/{action}", data={**form, CSRF_FIELD: token})
        assert answer.status_code == 403
    # An editor, from a page of another site
    assert site.browser("USER").post(f"{PAGE}/{action}", data=fields).status_code == 403
    assert site.browser().post(f"{PAGE}/{action}", data=fields).status_code == 401
    assert (command.requests, runs(), entries()) == ([], [], [])


def test_untriggerable_dag_moves_nothing(user):
    change_dag(has_import_errors=True)

    answer = send(user, "delete", scope="all", confirmed="yes")

    assert answer.status_code == 400
    assert "has import errors and cannot be triggered" in answer.text
    assert runs() == []


def test_paused_dag_is_announced(user):
    change_dag(is_paused=True)

    assert "The Dag is paused" in send(user, "requeue", scope="all").text
    assert "The Dag is paused" in send(user, "requeue", scope="all", confirmed="yes").text


def test_unwritable_audit_log_prevents_actions_and_payloads(user, command, monkeypatch):
    locked = OperationalError("insert", {}, Exception("database is locked"))
    monkeypatch.setattr(access, "create_session", mock.Mock(side_effect=locked))
    command.answers["show"] = letter(body="secret")
    request_count = len(command.requests)

    answer = send(user, "requeue", chosen="m-1", scope="marked", confirmed="yes")
    page = user.get(f"{PAGE}/m-1")

    assert (answer.status_code, page.status_code) == (503, 503)
    assert "audit log cannot be written, so nothing was done" in answer.text
    assert "secret" not in page.text
    assert runs() == []
    assert [request["ask"] for request in command.requests[request_count:]] == ["list"]


def test_without_broker_queries_the_page_uses_the_report(user, command, monkeypatch):
    monkeypatch.delenv("AIRFLOW__BROADWAY__ASK_BROKERS")

    text = user.get(PAGE).text
    assert '7, as of <time datetime="2026-01-30T12:00:00+00:00"' in text
    assert "reported by run r1" in text
    assert f"airflow-broadway dead-letters list --pipeline {__name__}:Orders" in text
    assert user.get(f"{PAGE}/m-1").status_code == 503
    send(user, "delete", scope="all", reason="why", confirmed="yes")

    assert command.requests == []
    assert letters_of_run()["reason"] == "why"
