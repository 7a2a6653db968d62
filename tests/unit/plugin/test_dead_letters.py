"""The dead letters' page: what it asks of the command line, what it shows, who may act."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.models.log import Log
from airflow.sdk import DAG
from airflow.utils.session import create_session
from sqlalchemy import delete, select
from sqlalchemy.exc import OperationalError

from airflow_broadway import Broadway
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.plugin.access import BROWSER_COOKIE, CSRF_FIELD, make_token
from airflow_broadway.plugin.children import Answer, ChildError
from airflow_broadway.plugin.pages import dead_letters
from airflow_broadway.producers.sqlite import SqliteProducer
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
    """Stands for the command line: answers what a test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.changed: list[tuple[str, ...]] = []
        self.answers: dict[str, Any] = {"list": listed()}

    async def ask(self, *arguments: str) -> Answer:
        self.asked.append(arguments)
        return self._answer(arguments)

    async def change(self, *arguments: str, timeout: float | None = None) -> Answer:
        assert timeout == dead_letters.MOVE_SECONDS
        self.changed.append(arguments)
        return self._answer(arguments)

    def _answer(self, arguments: tuple[str, ...]) -> Answer:
        assert arguments[0] == "dead-letters"
        value = self.answers[arguments[1]]
        if isinstance(value, Exception):
            raise value
        return Answer(json.loads(json.dumps(value)), 0, datetime(2026, 1, 31, tzinfo=UTC))

    @property
    def last(self) -> list[str]:
        """The arguments of the last question, without those that say which pipeline."""
        given = self.changed[-1] if self.changed else self.asked[-1]
        return [each for each in given[2:] if not each.startswith("--pipeline=")]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """A Dag with a pipeline, and the command that looks after its dead letters."""
    made = Command()
    monkeypatch.setattr(dead_letters, "CHILDREN", made)
    with stored_dags(Orders().dag("letters_unit")):
        yield made
    with create_session() as session:
        session.execute(delete(Log).where(Log.dag_id == "letters_unit"))


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
    assert asked[:2] == ("dead-letters", "list")
    assert json.loads(asked[2].removeprefix("--pipeline=")) == {
        "class": f"{__name__}:Orders",
        "options": {},
    }


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

    assert command.last == [
        "--message-id=m-1",
        "--reason=-x y",
        "--stage=batch",
        "--since=2026-01-31T12:00:00+00:00",
        "--until=2026-01-31T23:00:00+00:00",
        "--by-reason",
        "--seconds=10",
        "--limit=100",
        "--offset=100",
    ]
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
    assert "There are too many to look at all of them now" in text
    assert "of at least 900" in text


def test_a_broker_that_is_away_is_said_in_a_sentence(site: Site, command: Command) -> None:
    command.answers["list"] = ChildError("RabbitMQ at mq:5672 cannot be reached <b>now</b>")

    answer = site.browser("VIEWER").get(PAGE)

    assert answer.status_code == 503
    assert "cannot be reached &lt;b&gt;now&lt;/b&gt;." in answer.text
    assert "Try again" in answer.text


@pytest.mark.parametrize("query", ["?since=yesterday", "?until=x", "?reason=%00"])
def test_a_filter_that_is_none_is_said(site: Site, command: Command, query: str) -> None:
    assert site.browser("VIEWER").get(PAGE + query).status_code == 422
    assert command.asked == []


@pytest.mark.parametrize("number", ["0", "-1", "x", "9" * 50])
def test_a_page_that_is_none_is_the_first(site: Site, command: Command, number: str) -> None:
    assert site.browser("VIEWER").get(f"{PAGE}?page={number}").status_code == 200
    assert command.last[-1] == "--offset=0"


def test_a_pipeline_that_the_dag_does_not_have_is_not_found(site: Site, command: Command) -> None:
    answer = site.browser("VIEWER").get(PAGE.replace("Orders", "Others"))

    assert answer.status_code == 404
    assert command.asked == []


def test_a_pipeline_that_was_given_as_text_is_found_by_the_name_it_gives_itself(
    site: Site, command: Command
) -> None:
    with DAG("letters_unit", schedule=None) as dag:
        BroadwayProcessorOperator(
            task_id="process", pipeline="no_such_shop.orders:A", staging="file:///s"
        )
        BroadwayProcessorOperator(task_id="more", pipeline="no_such_shop.orders:B")
    with stored_dags(dag):
        site.browser("VIEWER").get(PAGE)

    assert command.asked[-1][2:6] == (
        '--pipeline={"class": "no_such_shop.orders:A", "options": {}}',
        '--pipeline={"class": "no_such_shop.orders:B", "options": {}}',
        "--named=Orders",
        "--staging=file:///s",
    )


# -------------------------------------------------------------------------------------- one letter


def test_a_payload_is_for_who_may_edit_and_does_nothing(site: Site, command: Command) -> None:
    command.answers["show"] = [letter(body=f'{{"a": "{EVIL}"}}', properties={"h": EVIL})]

    assert site.browser("VIEWER").get(f"{PAGE}/m-1").status_code == 403
    assert command.asked == []
    text = site.browser("USER").get(f"{PAGE}/m-1").text

    assert "--message-id=m-1" in command.last
    assert EVIL not in text
    assert text.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;") == 2
    assert '<strong aria-current="true">JSON</strong>' in text


def test_a_payload_of_bytes_is_shown_in_the_form_that_is_asked_for(
    site: Site, command: Command
) -> None:
    raw = base64.b64encode(b"\x00\xffab").decode()
    command.answers["show"] = [letter("-m/1", body_base64=raw, bytes=9)]
    browser = site.browser("USER")

    assert "00000000  00 ff 61 62</pre>" in browser.get(f"{PAGE}/-m%2F1").text
    assert "--message-id=-m/1" in command.last
    assert "\\x00\\xffab</pre>" in browser.get(f"{PAGE}/-m%2F1?as=text").text
    assert "too long to be laid out" in browser.get(f"{PAGE}/-m%2F1?as=json").text
    assert browser.get(f"{PAGE}/m-1?as=xml").status_code == 422


def test_a_letter_that_somebody_has_moved_is_no_more(site: Site, command: Command) -> None:
    command.answers["show"] = []

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


@pytest.mark.parametrize(("action", "says"), [("requeue", "back"), ("delete", "for good")])
def test_marked_letters_are_moved_once_that_is_confirmed(
    user: Browser, command: Command, action: str, says: str
) -> None:
    done = {"requeue": "requeued", "delete": "deleted"}[action]
    command.answers[action] = {
        done: 1,
        "unknown": ["m-2"],
        "refused": {"m-3": f"its queue is gone {EVIL}"},
    }

    asked = send(user, action, chosen=["m-1", "m-2", "m-1"], scope="marked", reason="why")
    assert command.changed == []
    assert f"2 dead letters {says}?" in asked.text
    assert asked.text.count('name="chosen"') == 2

    fields = {"chosen": ["m-1", "m-2"], "scope": "marked", "reason": "why", "confirmed": "yes"}
    answer = send(user, action, **fields)

    assert command.changed[0][:2] == ("dead-letters", action)
    assert command.last == ["--message-id=m-1", "--message-id=m-2"]
    assert "1 dead letter was" in answer.text
    assert "Somebody else was faster with these" in answer.text
    assert "its queue is gone &lt;script&gt;" in answer.text
    assert EVIL not in answer.text


def test_all_that_a_filter_finds_is_counted_before_and_moved_after_the_confirmation(
    user: Browser, command: Command
) -> None:
    command.answers["requeue"] = {"requeued": 5, "unknown": [], "refused": {}}

    asked = send(user, "requeue", scope="all", stage="process")
    assert "Send 5 dead letters back?" in asked.text
    assert "of 7 in queue &#39;orders&#39;" in asked.text
    assert command.changed == []

    answer = send(user, "requeue", scope="all", stage="process", confirmed="yes")
    assert command.last == ["--stage=process"]
    assert "5 dead letters were sent back" in answer.text


def test_all_letters_are_moved_where_no_filter_is_given(user: Browser, command: Command) -> None:
    command.answers["delete"] = {"deleted": 5, "unknown": [], "refused": {}}

    assert "Nobody can bring back what is deleted" in send(user, "delete", scope="all").text
    send(user, "delete", scope="all", confirmed="yes")

    assert command.last == ["--all"]


def test_nothing_is_moved_where_nothing_is_marked(user: Browser, command: Command) -> None:
    for fields in ({"scope": "marked"}, {}, {"scope": "marked", "chosen": [""]}):
        answer = send(user, "delete", **fields, confirmed="yes")
        assert answer.status_code == 422
        assert "No letter is marked" in answer.text
    assert command.changed == []


@pytest.mark.parametrize("action", ["requeue", "delete"])
def test_a_viewer_moves_nothing_and_neither_does_a_forged_request(
    site: Site, command: Command, action: str
) -> None:
    fields = {"chosen": "m-1", "scope": "marked", "confirmed": "yes"}
    command.answers[action] = {}

    # A viewer who has a token of his own all the same
    viewer = site.browser("VIEWER")
    viewer.cookies.set(BROWSER_COOKIE, "b")
    user = SimpleAuthManagerUser(username="viewer", role="VIEWER")
    token = make_token(user, "b", int(time.time()))
    for asked in (fields, fields | {"confirmed": ""}):
        answer = viewer.post(f"{PAGE}/{action}", data={**asked, CSRF_FIELD: token})
        assert answer.status_code == 403
    # Somebody who may edit, led here by another page
    assert site.browser("USER").post(f"{PAGE}/{action}", data=fields).status_code == 403
    assert site.browser().post(f"{PAGE}/{action}", data=fields).status_code == 401
    assert (command.asked, command.changed) == ([], [])


def test_a_command_that_does_not_end_is_said_and_what_may_have_been_done(
    user: Browser, command: Command
) -> None:
    command.answers["delete"] = ChildError("`airflow-broadway dead-letters` did not answer")

    answer = send(user, "delete", scope="all", confirmed="yes")

    assert answer.status_code == 503
    assert "Some letters may have been moved" in answer.text
    with create_session() as session:
        [entry] = session.scalars(select(Log).where(Log.dag_id == "letters_unit")).all()
        assert "did not answer" in json.loads(entry.extra or "")["error"]


def test_who_did_what_stands_in_airflows_audit_log(user: Browser, command: Command) -> None:
    command.answers["requeue"] = {"requeued": 1, "unknown": [], "refused": {}}

    send(user, "requeue", chosen="m-1", scope="marked", confirmed="yes")
    send(user, "requeue", scope="all", reason="why")  # only asked

    with create_session() as session:
        [entry] = session.scalars(select(Log).where(Log.dag_id == "letters_unit")).all()
        assert (entry.event, entry.owner) == ("broadway_dead_letters_requeue", "user")
        assert json.loads(entry.extra or "") == {"pipeline": "Orders", "ids": ["m-1"], "count": 1}


def test_what_was_done_is_shown_though_the_audit_log_cannot_be_written(
    user: Browser,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def locked() -> None:
        raise OperationalError("insert", {}, Exception("database is locked"))

    monkeypatch.setattr(dead_letters, "create_session", locked)
    command.answers["requeue"] = {"requeued": 1, "unknown": [], "refused": {}}

    answer = send(user, "requeue", chosen="m-1", scope="marked", confirmed="yes")

    assert answer.status_code == 200
    assert "could not be written into Airflow's audit log" in caplog.text


def test_where_brokers_are_not_asked_the_page_says_so(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__BROADWAY__ASK_BROKERS", "False")
    with stored_dags(Orders().dag("letters_unit")):
        for path in (PAGE, f"{PAGE}/m-1"):
            answer = site.browser("USER").get(path)

            assert answer.status_code == 503
            said = "rokers are not asked: `[broadway] ask_brokers` is off on the API server."
            assert said in answer.text


def test_half_a_surrogate_pair_of_a_sender_is_shown_as_its_escape(
    site: Site, command: Command
) -> None:
    half = "half \ud83d"
    asked = {"count": 1, "stage": "s\ud800", "reason": half}
    about = letter("m\udc00", reason=half, stage="s\ud800", properties={"a": half}, body=half)
    command.answers["list"] = listed(about, reasons=[asked])
    command.answers["show"] = [{**about, "body": "x"}]

    browser = site.browser("ADMIN")
    rows, one = browser.get(PAGE), browser.get(f"{PAGE}/m-1")

    assert (rows.status_code, one.status_code) == (200, 200)
    assert "half \\ud83d" in rows.text
    assert "half \\ud83d" in one.text
