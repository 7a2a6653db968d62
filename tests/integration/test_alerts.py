"""Airflow's callbacks on the tasks of a run, with a real notifier and a mail server of the test."""

from __future__ import annotations

import email
import logging
import re
import socketserver
import sys
import threading
from datetime import timedelta
from email import policy
from email.message import EmailMessage
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_broadway import Message
from airflow_broadway.operators.run import BroadwayRunOperator
from tests.integration.pipelines.puppets import Puppets

pytestmark = pytest.mark.airflow

GUIDE = Path(__file__).parents[2] / "docs" / "alerts.md"
#: A sender's markup, for mail and chat to render.
EVIL = "<b>urgent</b> <!channel> [pay](http://evil.example)"
NO_DELAY = {"retries": 0, "retry_delay": timedelta(0)}


class Orders(Puppets):
    """Fails a message with its sender's text as the reason."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if EVIL.encode() in message.data:
            raise ValueError(f"invalid order: {message.data!r}")
        return super().handle_message(processor, message, context)


class _SmtpSession(socketserver.StreamRequestHandler):
    """Implements the part of SMTP that smtplib needs, and stores the mails."""

    server: MailServer

    def handle(self) -> None:
        self.wfile.write(b"220 test\r\n")
        while line := self.rfile.readline():
            verb = line[:4].upper()
            if verb == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                lines = list(iter(self.rfile.readline, b".\r\n"))
                result = email.message_from_bytes(b"".join(lines), policy=policy.default)
                self.server.mails.append(result)
            self.wfile.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")


class MailServer(socketserver.ThreadingTCPServer):
    """Receives mail on the loopback interface."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _SmtpSession)
        self.mails: list[EmailMessage] = []


@pytest.fixture
def mails(world):
    """The mails that were sent through the connection ``smtp_default``."""
    with MailServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = {
            "conn_type": "smtp",
            "host": "127.0.0.1",
            "port": server.server_address[1],
            "extra": {"disable_ssl": True, "disable_tls": True, "from_email": "a@example.org"},
        }
        world.connect("smtp_default", connection)
        yield server.mails
        server.shutdown()


def load_guide_dag(monkeypatch: pytest.MonkeyPatch) -> DAG:
    """Returns the Dag of the guide, whose messages have one attempt."""
    module = ModuleType("orders_pipeline")
    module.Orders = Orders(producer={"retry": {"max_attempts": 1}})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orders_pipeline", module)
    [source] = re.findall(
        r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(compile(source, str(GUIDE), "exec"), names)
    dag: DAG = names["dag"]
    return dag


def text_of(mail: EmailMessage) -> str:
    """Returns the subject and the readable text of a mail."""
    bodies = [part.get_content() for part in mail.walk() if not part.is_multipart()]
    return "\n".join([str(mail["subject"]), *bodies])


def test_the_guides_example_mails_dead_letters_of_a_green_run(world, mails, monkeypatch):
    world.numbers(range(4))
    world.send({"n": 5, "text": EVIL})

    ran = world.run(load_guide_dag(monkeypatch))

    assert ran.state == "success"
    [mail] = mails
    assert mail["to"] == "data@example.org"
    assert mail["subject"] == "Dead letters in orders"
    assert "5 messages received: 4 acked, 1 dead-lettered." in text_of(mail)
    assert "evil" not in text_of(mail)
    assert "evil" not in str(ran.xcom("ack"))
    assert "evil" in str(ran.report["reasons"])


def test_the_guides_example_mails_nothing_of_a_run_without_dead_letters(world, mails, monkeypatch):
    world.numbers(range(4))

    assert world.run(load_guide_dag(monkeypatch)).totals["acked"] == 4
    assert mails == []


def test_the_guides_example_mails_no_text_from_senders(world, mails, monkeypatch):
    world.send({"n": 5, "text": EVIL})

    ran = world.run(load_guide_dag(monkeypatch))

    assert ran.states["ack"] == "failed"
    [mail] = mails
    assert mail["subject"] == "orders needs a look"
    text = " ".join(text_of(mail).split())
    assert "1 message failed, every message that was handled (fail_when='all')" in text
    assert "1 message received: 1 dead-lettered." in text
    assert "evil" not in text
    assert "evil" in str(ran.report["reasons"])


def test_a_failing_callback_does_not_change_the_run(world, caplog):
    calls: list[Any] = []

    def fail(context: Any) -> None:
        calls.append(context)
        raise RuntimeError("away")

    world.numbers(range(3))
    with caplog.at_level(logging.ERROR):
        ran = world.run(
            Puppets.dag("puppets", default_args=NO_DELAY, ack={"on_success_callback": fail})
        )

    assert ran.state == "success"
    assert ran.totals == {"received": 3, "acked": 3, "accounted": 3}
    assert len(calls) == 1


def test_a_run_in_one_task_calls_the_same_callbacks(world):
    # Given a callback for each way in which a run may end
    failures: list[str] = []
    successes: list[Any] = []

    def on_success(context: Any) -> None:
        successes.append(context["ti"].xcom_pull(task_ids=context["ti"].task_id))

    with DAG("puppets") as dag:
        BroadwayRunOperator(
            task_id="drain",
            pipeline=Orders(producer={"retry": {"max_attempts": 1}}),
            on_failure_callback=lambda context: failures.append(str(context["exception"])),
            on_success_callback=on_success,
        )

    # When one run succeeds, and one fails
    world.send({"n": 1}, {"n": 2, "text": EVIL})
    assert world.run(dag).state == "success"
    world.send({"n": 3, "text": EVIL})
    assert world.run(dag).state == "failed"

    # Then each callback has figures and no sender's text
    [value], [failure] = successes, failures
    assert value["summary"] == "2 messages received: 1 acked, 1 dead-lettered."
    assert value["dead_lettered"] == 1
    assert failure == (
        "All messages are settled or released, but 1 message failed, every message that was"
        " handled (fail_when='all').  1 message received: 1 dead-lettered."
    )
    assert "evil" not in f"{value}{failure}"
