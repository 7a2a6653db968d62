"""The dead letters' page: what it asks of a child process, what it shows, who may act."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.log import Log
from airflow.sdk import DAG
from airflow.utils.session import create_session
from sqlalchemy import delete, select
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


def letter(key: str = "m-1", **about: Any) -> dict[str, Any]:
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
        **about,
    }


def listed(*letters: dict[str, Any], **about: Any) -> dict[str, Any]:
    reason = {"count": len(letters), "stage": "process", "reason": "ValueError: why"}
    return {
        "place": "queue 'orders'",
        "total": len(letters),
        "matching": len(letters),
        "whole": True,
        "reasons": [reason] if letters else [],
        "other_reasons": 0,
        "letters": list(letters),
        **about,
    }


class Command:
    """Stands for the child process: answers what a test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {"list": listed()}

    async def ask(self, question: dict[str, Any]) -> Answer:
        self.asked.append(question)
        value = self.answers[question["ask"]]
        if isinstance(value, Exception):
            raise value
        return Answer(json.loads(json.dumps(value)), datetime(2026, 1, 31, tzinfo=UTC))


def report(site: Site, dag_id: str = "letters_unit", pipeline: str = "Orders") -> None:
    """What a run of the pipeline reports of its queue."""
    queues = WatchedQueues(pipeline, [SqliteProducer(queue="orders", path="/tmp/orders.db")])
    at = datetime(2026, 1, 30, 12, tzinfo=UTC)
    depth = QueueDepth(5, 0, 0, 7, 60.0)
    store = open_store(site.staging.as_uri())
    report_backlog(store, dag_id, queues, depth, at=at, by="run r1")


@pytest.fixture
def command(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """A Dag with a pipeline whose last run has reported its queue, and brokers are asked."""
    made = Command()
    monkeypatch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "True")
    monkeypatch.setattr(dead_letters, "CHILDREN", made)
    report(site)
    with stored_dags(Orders().dag("letters_unit")):
        yield made
    with create_session() as session:
        session.execute(delete(Log).where(Log.dag_id == "letters_unit"))


def runs() -> list[DagRun]:
    with create_session() as session:
        return list(session.scalars(select(DagRun).where(DagRun.dag_id == "letters_unit")))


def entries() -> list[tuple[str, str, str | None, dict[str, Any]]]:
    """The audit log: event, owner, run and extra of each entry."""
    with create_session() as session:
        found = session.scalars(select(Log).where(Log.dag_id == "letters_unit")).all()
        return [(e.event, str(e.owner), e.run_id, json.loads(e.extra or "")) for e in found]


# ------------------------------------------------------------------------------------------- look


def test_a_viewer_sees_the_list_by_reason_and_no_payload_and_nothing_to_press(
    site: Site, command: Command
) -> None:
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
    [asked] = command.asked
    assert asked["ask"] == "list"
    assert json.loads(asked["queues"])["queues"] == [
        {
            "producer": "airflow_broadway.producers.sqlite.producer:SqliteProducer",
            "options": {"queue": "orders", "path": "/tmp/orders.db"},
        }
    ]


def test_who_may_edit_has_links_to_each_letter_and_boxes_to_mark_it(
    site: Site, command: Command
) -> None:
    command.answers["list"] = listed(letter("m-1"), letter("a/b?c <d>"))

    text = site.browser("USER").get(PAGE).text

    assert f'href="{PAGE}/a%2Fb%3Fc%20%3Cd%3E"' in text
    assert text.count('name="chosen"') == 2
    assert 'name="csrf" value="' in text


def test_a_filter_and_a_page_are_asked_for(site: Site, command: Command) -> None:
    command.answers["list"] = listed(letter(), total=1000, matching=250)

    query = "?reason=-x+y&stage=batch&since=2026-01-31T12:00&until=2026-02-01T00:00:00%2B01:00"
    text = site.browser("VIEWER").get(f"{PAGE}{query}&id=m-1&page=2").text

    [asked] = command.asked
    assert asked["choice"] == {
        "ids": ["m-1"],
        "reason": "-x y",
        "stage": "batch",
        "since": "2026-01-31T12:00:00+00:00",
        "until": "2026-01-31T23:00:00+00:00",
    }
    assert (asked["seconds"], asked["limit"], asked["offset"]) == (10, 100, 100)
    assert 'value="2026-01-31T23:00:00"' in text
    assert "Page 2 of 3" in text
    assert 'rel="next" href="' in text
    assert "reason=-x+y" in text.split('rel="next" href="', 1)[1].split('"', 1)[0]


def test_of_very_many_letters_the_page_says_that_it_did_not_see_all(
    site: Site, command: Command
) -> None:
    command.answers["list"] = listed(letter(), total=2_000_000, matching=90_000, whole=False)

    text = site.browser("VIEWER").get(f"{PAGE}?stage=process").text

    assert "at least 90\N{NARROW NO-BREAK SPACE}000 found by the filter" in text
    assert "There are too many to read all of them" in text
    assert "of at least 900" in text


def test_a_broker_that_is_away_is_said_in_a_sentence(site: Site, command: Command) -> None:
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
def test_a_filter_that_is_none_is_said(site: Site, command: Command, query: str) -> None:
    assert site.browser("VIEWER").get(PAGE + query).status_code == 422
    assert command.asked == []


@pytest.mark.parametrize("number", ["0", "-1", "x", "9" * 50])
def test_a_page_that_is_none_is_the_first(site: Site, command: Command, number: str) -> None:
    assert site.browser("VIEWER").get(f"{PAGE}?page={number}").status_code == 200
    assert command.asked[-1]["offset"] == 0


def test_a_pipeline_that_the_dag_does_not_have_is_not_found(site: Site, command: Command) -> None:
    answer = site.browser("VIEWER").get(PAGE.replace("Orders", "Others"))

    assert answer.status_code == 404
    assert command.asked == []


def test_a_pipeline_that_was_given_as_text_is_found_by_what_its_run_reported(
    site: Site, command: Command
) -> None:
    with DAG("letters_unit", schedule=None) as dag:
        BroadwayProcessorOperator(task_id="process", pipeline="no_such_shop.orders:A")
    with stored_dags(dag):
        assert site.browser("VIEWER").get(PAGE).status_code == 200
        assert site.browser("VIEWER").get(PAGE.replace("Orders", "A")).status_code == 503
        assert site.browser("VIEWER").get(PAGE.replace("Orders", "B")).status_code == 404


def test_before_the_first_run_nothing_is_known_and_nothing_asked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stored_dags(Orders().dag("letters_unit")):
        text = site.browser("VIEWER").get(PAGE).text
        assert "no run, trigger or sensor has reported it yet" in text
        monkeypatch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "True")
        answer = site.browser("USER").get(PAGE)
        assert "has reported the options of its producer yet" in answer.text


# -------------------------------------------------------------------------------------- one letter


def test_a_payload_is_for_who_may_edit_and_does_nothing(site: Site, command: Command) -> None:
    command.answers["show"] = letter(body=f'{{"a": "{EVIL}"}}', properties={"h": EVIL})

    assert site.browser("VIEWER").get(f"{PAGE}/m-1").status_code == 403
    assert command.asked == []
    assert entries() == []
    text = site.browser("USER").get(f"{PAGE}/m-1").text

    assert command.asked[-1]["id"] == "m-1"
    shown = {"pipeline": "Orders", "id": "m-1"}
    assert entries() == [("broadway_dead_letters_show", "user", None, shown)]
    assert EVIL not in text
    assert text.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") == 2
    assert '<strong aria-current="true">JSON</strong>' in text


def test_a_payload_of_bytes_is_shown_in_the_form_that_is_asked_for(
    site: Site, command: Command
) -> None:
    raw = base64.b64encode(b"\x00\xffab").decode()
    command.answers["show"] = letter("-m/1", body_base64=raw, bytes=9)
    browser = site.browser("USER")

    assert "00000000  00 ff 61 62</pre>" in browser.get(f"{PAGE}/-m%2F1").text
    assert command.asked[-1]["id"] == "-m/1"
    assert "\\x00\\xffab</pre>" in browser.get(f"{PAGE}/-m%2F1?as=text").text
    assert "too long to be laid out" in browser.get(f"{PAGE}/-m%2F1?as=json").text
    assert browser.get(f"{PAGE}/m-1?as=xml").status_code == 422


def test_a_letter_that_somebody_has_moved_is_no_more(site: Site, command: Command) -> None:
    command.answers["show"] = None

    answer = site.browser("USER").get(f"{PAGE}/m-1")

    assert answer.status_code == 404
    assert "m-1 is no dead letter, or no more" in answer.text


# --------------------------------------------------------------------------------------------- act


def send(browser: Browser, action: str, **fields: Any) -> Any:
    return browser.form(PAGE, f"{PAGE}/{action}", **fields)


@pytest.fixture
def user(site: Site, command: Command) -> Browser:
    """Somebody who may edit, before a page with letters."""
    command.answers["list"] = listed(letter("m-1"), letter("m-2"), total=7, matching=5)
    return site.browser("USER")


@pytest.mark.parametrize(
    ("action", "heading"),
    [("requeue", "Requeue 2 dead letters?"), ("delete", "Delete 2 dead letters for good?")],
)
def test_marked_letters_are_moved_by_a_run_once_that_is_confirmed(
    user: Browser, action: str, heading: str
) -> None:
    asked = send(user, action, chosen=["m-1", "m-2", "m-1"], scope="marked", reason="why")
    assert (runs(), entries()) == ([], [])
    assert heading in asked.text
    assert asked.text.count('name="chosen"') == 2

    fields = {"chosen": ["m-1", "m-2"], "scope": "marked", "reason": "why", "confirmed": "yes"}
    answer = send(user, action, **fields)

    assert answer.status_code == 200
    letters = {"pipeline": "Orders", "action": action, "ids": ["m-1", "m-2"]}
    [run] = runs()
    assert run.conf == {"source": "dead_letters", "dead_letters": letters}
    assert (run.state, run.run_type, run.triggering_user_name) == ("queued", "manual", "user")
    assert entries() == [(f"broadway_dead_letters_{action}", "user", run.run_id, letters)]
    assert f"/dags/letters_unit/runs/{quote(run.run_id)}" in answer.text


def test_all_that_a_filter_finds_is_moved_after_the_confirmation(user: Browser) -> None:
    asked = send(user, "requeue", scope="all", stage="process")
    assert "Requeue the dead letters found?" in asked.text
    assert runs() == []

    send(user, "requeue", scope="all", stage="process", confirmed="yes")
    [run] = runs()
    wanted = {"pipeline": "Orders", "action": "requeue", "stage": "process"}
    assert run.conf
    assert run.conf["dead_letters"] == wanted


def test_all_letters_are_moved_where_no_filter_is_given(user: Browser) -> None:
    text = send(user, "delete", scope="all").text
    assert "Deleted messages cannot be restored" in text
    assert "there were 7 as of" in text

    send(user, "delete", scope="all", confirmed="yes")
    [run] = runs()
    assert run.conf
    assert run.conf["dead_letters"] == {"pipeline": "Orders", "action": "delete"}


def test_nothing_is_moved_where_nothing_is_marked(user: Browser) -> None:
    for fields in ({"scope": "marked"}, {}, {"scope": "marked", "chosen": [""]}):
        answer = send(user, "delete", **fields, confirmed="yes")
        assert answer.status_code == 422
        assert "No letter is marked" in answer.text
    assert (runs(), entries()) == ([], [])


@pytest.mark.parametrize("action", ["requeue", "delete"])
def test_a_viewer_moves_nothing_and_neither_does_a_forged_request(
    site: Site, command: Command, action: str
) -> None:
    fields = {"chosen": "m-1", "scope": "marked", "confirmed": "yes"}

    # A viewer who has a token of his own all the same
    viewer = site.browser("VIEWER")
    viewer.cookies.set(BROWSER_COOKIE, "b")
    user = SimpleAuthManagerUser(username="viewer", role="VIEWER")
    token = make_token(user, "b")
    for asked in (fields, fields | {"confirmed": ""}):
        answer = viewer.post(f"{PAGE}/{action}", data={**asked, CSRF_FIELD: token})
        assert answer.status_code == 403
    # Somebody who may edit, led here by another page
    assert site.browser("USER").post(f"{PAGE}/{action}", data=fields).status_code == 403
    assert site.browser().post(f"{PAGE}/{action}", data=fields).status_code == 401
    assert (command.asked, runs(), entries()) == ([], [], [])


def test_a_dag_that_airflow_does_not_trigger_moves_nothing(user: Browser) -> None:
    with create_session() as session:
        dag = session.get(DagModel, "letters_unit")
        assert dag is not None
        dag.has_import_errors = True

    answer = send(user, "delete", scope="all", confirmed="yes")

    assert answer.status_code == 400
    assert "has import errors and cannot be triggered" in answer.text
    assert runs() == []


def test_a_paused_dag_is_said_to_wait(user: Browser) -> None:
    with create_session() as session:
        dag = session.get(DagModel, "letters_unit")
        assert dag is not None
        dag.is_paused = True

    assert "The Dag is paused" in send(user, "requeue", scope="all").text
    assert "The Dag is paused" in send(user, "requeue", scope="all", confirmed="yes").text


def test_nothing_is_done_and_no_payload_shown_where_the_audit_log_cannot_be_written(
    user: Browser, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked() -> None:
        raise OperationalError("insert", {}, Exception("database is locked"))

    monkeypatch.setattr(access, "create_session", locked)
    command.answers["show"] = letter(body="secret")
    asked = len(command.asked)

    answer = send(user, "requeue", chosen="m-1", scope="marked", confirmed="yes")
    shown = user.get(f"{PAGE}/m-1")

    assert (answer.status_code, shown.status_code) == (503, 503)
    assert "audit log cannot be written, so nothing was done" in answer.text
    assert "secret" not in shown.text
    assert runs() == []
    assert [each["ask"] for each in command.asked[asked:]] == ["list"]


def test_where_brokers_are_not_asked_the_page_has_the_report_and_acts_all_the_same(
    user: Browser, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIRFLOW__BROADWAY__ASK_BROKERS")

    text = user.get(PAGE).text
    assert '7, as of <time datetime="2026-01-30T12:00:00+00:00"' in text
    assert "reported by run r1" in text
    assert f"airflow-broadway dead-letters list --pipeline {__name__}:Orders" in text
    assert user.get(f"{PAGE}/m-1").status_code == 503
    send(user, "delete", scope="all", reason="why", confirmed="yes")

    assert command.asked == []
    [run] = runs()
    assert run.conf
    assert run.conf["dead_letters"]["reason"] == "why"
