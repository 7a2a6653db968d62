"""Checks of a real broker's policies, before the first message and on demand."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.address import Address, address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker import checks
from airflow_broadway.producers.rabbitmq.broker.checks import ApiError, Management, check_queues
from airflow_broadway.testing.harness import settlement_of
from tests.cli_runs import ran
from tests.rabbitmq_place import PASSWORD, Place, manage, permitted
from tests.unit.passing import Passing

pytestmark = pytest.mark.broker


@pytest.fixture
def extra(undeclared):
    """Returns the extras of a connection that reaches the management API."""
    return {"management_url": f"http://127.0.0.1:{undeclared.server.management_port}"}


@contextlib.contextmanager
def policy(
    place: Place, pattern: str, *, operator: bool = False, **definition: Any
) -> Iterator[str]:
    name = f"p-{uuid.uuid4().hex[:8]}"
    path = f"{'operator-' if operator else ''}policies/%2F/{name}"
    named = {key.replace("_", "-"): value for key, value in definition.items()}
    manage(
        place.server,
        "PUT",
        path,
        {"pattern": pattern, "definition": named, "apply-to": "queues", "priority": 1},
    )
    try:
        yield name
    finally:
        manage(place.server, "DELETE", path)


def receive_all(place: Place, generation: str, **connection: Any) -> list[Message]:
    """Receives all messages as a run with its own connection, and settles none."""
    source = RabbitMQProducer(queue=place.name, conn_id="rabbit").source(
        place.env(generation, **connection)
    )
    try:
        return place.take(source)
    finally:
        source.close()


def test_a_lossy_policy_is_an_error_before_the_first_receive(place, extra):
    place.send(b"1", b"2")
    pattern = rf"^broadway\..*{place.name}"

    with (
        policy(place, pattern, operator=True, expires=3_600_000) as name,
        pytest.raises(ProducerError, match=rf"operator policy '{name}' sets expires") as raised,
    ):
        receive_all(place, "g1", extra=extra)

    # Then no queue is declared and no message received until the policy is deleted
    assert r"let no such policy match ^broadway\." in str(raised.value)
    assert place.depth(place.queues.held(0)) is None
    assert [m.data for m in receive_all(place, "g2", extra=extra)] == [b"1", b"2"]


def test_a_policy_on_the_source_is_a_warning_with_its_effect(place, extra, caplog):
    place.send(b"1")

    with policy(place, f"^{place.name}$", max_length=100):
        assert len(receive_all(place, "g1", extra=extra)) == 1

    [result] = [text for text in caplog.messages if place.name in text and "max-length" in text]
    assert "sets max-length 100: the oldest message is dropped" in result


def test_every_run_checks_policies(place, extra, monkeypatch):
    checked: list[str] = []

    def record_check(connection: ConnectionThread, options: RabbitMQProducer) -> list[Any]:
        checked.append(options.queue)
        return check_queues(connection, options)

    monkeypatch.setattr(checks, "check_queues", record_check)
    assert receive_all(place, "g0", extra=extra) == []

    for generation in ("g1", "g2"):
        place.send(b"1")
        assert len(receive_all(place, generation, extra=extra)) == 1

    assert checked == [place.name] * 3


def settle(place: Place, lease: Lease, settlement: Settlement, **connection: Any) -> SettleReport:
    """Settles a lease with a connection that reaches the management API."""
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit")
    custodian = producer.custodian(place.env("custodian", **connection))
    try:
        return custodian.settle(lease, settlement)
    finally:
        custodian.close()


@pytest.mark.parametrize("queue", ["held", "dead"])
def test_a_lossy_policy_keeps_a_dead_runs_messages_in_place(place, extra, queue):
    """A run checks policies before its sweep: the sweep is the first step that moves messages."""
    # Given a run that checked the policies just now, and one that died and whose lease has lapsed
    assert receive_all(place, "g0", extra=extra) == []
    place.send(*[b"%d" % number for number in range(300)])
    messages, _ = place.hold(lease=3.0)
    assert len(messages) == 300
    time.sleep(3)
    before = place.depth(place.queues.held(0))

    # When a policy would delete messages from one of the queues
    with (
        policy(place, rf"^broadway\.{queue}\.{place.name}", expires=3_600_000) as name,
        pytest.raises(ProducerError, match=f"'{name}' sets expires 3600000 ms"),
    ):
        receive_all(place, "g2", extra=extra)

    # Then no message has moved, and all are redelivered once the policy is deleted
    assert (place.depth(place.queues.held(0)), place.depth(place.name)) == (before, 0)
    redelivered = receive_all(place, "g3", extra=extra)
    assert sorted(m.data for m in redelivered) == sorted(m.data for m in messages)
    assert all(m.redelivered for m in redelivered)


@pytest.mark.parametrize(
    ("verdict", "queue", "definition"),
    [
        (Verdict(Action.DEAD_LETTER, reason="bad"), "dead", {"message_ttl": 100}),
        (Verdict(Action.RETRY, 60.0), "delay.60", {"expires": 100}),
    ],
)
def test_a_policy_set_during_a_run_keeps_only_failed_messages(
    place, extra, verdict, queue, definition
):
    place.send(b"bad", b"good", b"good")
    messages, lease = place.hold()
    settlement = settlement_of(messages, {messages[0].message_id: verdict})

    with policy(place, rf"^broadway\.{queue}\.{place.name}", **definition) as name:
        report = settle(place, lease, settlement, extra=extra)
        time.sleep(1)

    assert (report.acked, report.failed) == (2, 1)
    assert f"policy '{name}'" in " ".join(report.errors)
    assert [m.data for m in receive_all(place, "g2", extra=extra)] == [b"bad"]


def test_a_run_without_management_api_warns(place, caplog):
    caplog.set_level("WARNING")
    place.send(b"1")

    messages = receive_all(place, "g1", extra={"management_url": "http://127.0.0.1:1"})

    assert len(messages) == 1
    [result] = [text for text in caplog.messages if "could not be checked" in text]
    assert "the management API at http://127.0.0.1:1 cannot be reached" in result


def test_a_missing_user_tag_is_named(place, extra, caplog):
    caplog.set_level("WARNING")
    place.send(b"1")

    with permitted(place.server) as user:
        assert len(receive_all(place, "g1", extra=extra, **user)) == 1

    assert f"refuses user {user['login']!r}, who needs the tag 'management'" in caplog.text
    assert PASSWORD not in caplog.text


def test_the_management_tag_suffices_except_for_feature_flags(place, extra):
    with permitted(place.server, tags="management") as user:
        address = address_for(
            RabbitMQProducer(queue=place.name, conn_id="c"), place.env(extra=extra, **user)
        )
        with closing(ConnectionThread.to(address)) as connection:
            findings = check_queues(connection, RabbitMQProducer(queue=place.name))

    assert [finding.level for finding in findings] == ["note"]
    assert "only an administrator" in findings[0].text


@pytest.mark.parametrize(
    ("url", "result"),
    [
        ("", "is false"),
        ("ftp://host", "must be http"),
        (f"http://me:{PASSWORD}@host", "must be http"),
        ("http://[", "must be http"),
    ],
)
def test_an_invalid_management_address_is_reported_without_showing_it(url, result):
    with pytest.raises(ApiError, match=result) as raised:
        Management(Address(management_url=url))

    assert PASSWORD not in f"{raised.value} {Address(management_url=url)!r}"


def test_the_password_is_not_sent_unencrypted_to_another_port(caplog):
    with pytest.raises(ApiError, match=r"to 'http://rabbit\.example\.org:15672', or false"):
        Management(Address(host="rabbit.example.org"))

    for host in ("localhost", "127.0.0.1", "::1"):
        assert ":15672" in Management(Address(host=host)).url
    assert ":15671" in Management(Address(host="rabbit.example.org", tls={})).url
    assert caplog.messages == []
    Management(Address(management_url="http://rabbit.example.org"))
    [result] = caplog.messages
    assert result == (
        "The user and password of RabbitMQ go unencrypted to http://rabbit.example.org: use"
        " https://."
    )


def test_management_checks_can_be_disabled(place, caplog):
    caplog.set_level("INFO")
    place.send(b"1")

    assert len(receive_all(place, "g1", extra={"management_url": False})) == 1

    assert "Policies are not checked" in caplog.text
    assert not [
        record
        for record in caplog.records
        if record.levelname == "WARNING" and "polic" in record.getMessage()
    ]


def test_a_foreign_server_at_the_management_port_is_a_warning(undeclared):
    wrong = Management(Address(management_url=f"http://127.0.0.1:{undeclared.port}"))

    with pytest.raises(ApiError, match="cannot be reached"):
        wrong.policies()


# -- the command -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _staging(tmp_path, monkeypatch):
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}")


@pytest.fixture
def connection(undeclared, extra, monkeypatch):
    value = json.dumps(undeclared.server.connection(extra=extra))
    monkeypatch.setenv("AIRFLOW_CONN_RABBIT_CHECKED", value)
    return "rabbit_checked"


def make_reference(pipeline: type[Passing], **producer: Any) -> str:
    name = f"tests.integration.test_rabbitmq_checks:{pipeline.__name__}"
    return json.dumps({"class": name, "options": {"producer": producer}})


def test_the_command_prints_findings(place, connection, capsys):
    checked = make_reference(Checked, queue=place.name, conn_id=connection)

    fine = ran(capsys, "check", "--pipeline", checked)
    with policy(place, rf"^broadway\.held\.{place.name}", message_ttl=1000):
        harmful = ran(capsys, "check", "--pipeline", checked)
        as_json = ran(capsys, "check", "--pipeline", checked, "--json")

    assert (fine.code, fine.err) == (0, "")
    assert fine.out.endswith("\nA run of Checked can begin.\n")
    assert "error" not in fine.out
    assert "warning" not in fine.out
    assert harmful.code == as_json.code == 1
    assert f"error: the queue '{place.queues.held(0)}'" in harmful.out
    assert [finding["level"] for finding in json.loads(as_json.out)] == ["error", "note", "note"]


def test_depth_counts_held_bundles(place):
    # Given 1,200 messages that a run holds
    place.send(*[b"%d" % number for number in range(1_200)])
    _, lease = place.hold(lease=3.0)
    count = lease.state["bundles"]
    assert 3 <= count < 100

    time.sleep(3)
    assert place.producer().depth(place.env()).ready == count


@pytest.mark.parametrize("kind", ["no tag", "false", "nobody there"])
def test_the_command_warns_of_unreadable_policies(place, extra, monkeypatch, capsys, kind):
    url = {"false": False, "nobody there": "http://127.0.0.1:1"}.get(kind, extra["management_url"])
    with permitted(place.server) as user:
        value = place.server.connection(**user, extra={"management_url": url})
        monkeypatch.setenv("AIRFLOW_CONN_RABBIT_BLIND", json.dumps(value))
        reference = make_reference(Checked, queue=place.name, conn_id="rabbit_blind")
        result = ran(capsys, "check", "--pipeline", reference)

    assert result.code == 0
    warning = "warning: whether policies make this run lose messages could not be checked"
    assert warning in result.out
    assert PASSWORD not in result.out + result.err


class Checked(Passing):
    producer = RabbitMQProducer(queue="{{ var.value.queue }}", on_failure="retry")


class Sharded(Checked):
    producer = RabbitMQProducer(
        queue="nobody's",
        concurrency=2,
        on_failure="retry",
        merge_options=lambda index: {"queue": f"sharded-{index}"},
    )


def test_the_command_checks_every_producers_queue(undeclared, connection, capsys):
    with undeclared.channel() as channel:
        channel.queue_declare("sharded-0", durable=True)

    reference = make_reference(Sharded, conn_id=connection)
    result = ran(capsys, "check", "--pipeline", reference, "--json")

    assert result.code == 1
    finding, *_ = json.loads(result.out)
    assert "has no queue 'sharded-1'" in finding["text"]


def test_the_command_refuses_a_template(undeclared, connection, capsys):
    templated = ran(capsys, "check", "--pipeline", make_reference(Checked, conn_id=connection))

    assert templated.code == 2
    assert "has the template queue='{{ var.value.queue }}'" in templated.err
