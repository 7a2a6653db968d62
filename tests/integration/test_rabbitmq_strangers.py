"""Attacks on queues, at a real broker and in the staging folder."""

from __future__ import annotations

import dataclasses
import re
import shutil
import threading
import uuid
from pathlib import Path

import pika
import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker.holding_queues import KEEPING, QueueNames
from airflow_broadway.producers.rabbitmq.bundle import Header, Held, pack
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_place import Place, marked, permitted

pytestmark = pytest.mark.broker

GUIDE = Path(__file__).parents[2] / "docs" / "rabbitmq.md"


@pytest.fixture
def victim(place):
    """Yields another pipeline's dead-letter queue, which is empty."""
    queues = QueueNames(f"victim-{uuid.uuid4().hex}")
    with place.channel() as channel:
        channel.queue_declare(queues.dead, durable=True, arguments=KEEPING)
        yield queues.dead
        channel.queue_delete(queues.dead)


def guide_permissions(queue: str) -> dict[str, str]:
    """Returns the guide's permissions, for another queue than ``orders``."""
    [block] = re.findall(r"set_permissions -p / airflow \\\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    patterns = [text.replace("orders", re.escape(queue)) for text in re.findall("'(.*)'", block)]
    return dict(zip(("configure", "write", "read"), patterns, strict=True))


def run_once(
    place: Place, generation: str, *verdicts: Verdict, **user: str
) -> tuple[list[Message], SettleReport, str]:
    """Runs once as a user; returns its messages, its report and its holding queue.

    :param verdicts: Those of its messages, in order.
    """
    producer = RabbitMQProducer(queue=place.name, conn_id="rabbit", on_failure="retry")
    source = producer.source(place.env(generation, **user))
    try:
        messages = place.take(source)
        lease = source.lease
    finally:
        source.close()
    custodian = producer.custodian(place.env("custodian", **user))
    try:
        chosen = {m.message_id: v for m, v in zip(messages, verdicts, strict=False)}
        report = custodian.settle(lease, settlement_of(messages, chosen))
    finally:
        custodian.close()
    return messages, report, str(lease.state["holding_queue"])


GUEST = {"login": "guest", "password": "guest"}


def test_the_guides_permissions_suffice_for_runs(place):
    # Given a run with the permissions that the guide grants
    place.send(b"1", b"2", b"3", b"4")

    with permitted(place.server, tags="management", **guide_permissions(place.name)) as user:
        verdicts = (Action.ACK, Action.RETRY, Action.DEAD_LETTER, Action.RELEASE)
        delayed = (Verdict(action, 60.0) for action in verdicts)
        _, report, _ = run_once(place, "g1", *delayed, **user)

        # When the next run uses the same holding queue
        messages, next_report, holding_queue = run_once(place, "g2", **user)

    # Then nothing was refused
    assert report == SettleReport(acked=1, requeued=1, dead_lettered=1, released=1)
    assert [message.data for message in messages] == [b"4"]
    assert next_report == SettleReport(acked=1)
    assert holding_queue == place.queues.held(0)


def test_the_guides_permissions_exclude_other_sources(place, victim):
    with permitted(place.server, tags="management", **guide_permissions(place.name)) as user:
        login = pika.PlainCredentials(user["login"], user["password"])
        for forbidden in ("basic_get", "queue_purge", "queue_delete"):
            with (
                pika.BlockingConnection(
                    pika.ConnectionParameters(place.host, place.port, credentials=login)
                ) as connection,
                pytest.raises(pika.exceptions.ChannelClosedByBroker, match="ACCESS_REFUSED"),
            ):
                getattr(connection.channel(), forbidden)(victim)


def test_forged_bundles_settle_nothing(place):
    # Given a run, and a sender that names its generation through the default exchange
    place.send(b"1")
    messages, lease = place.hold("g1")
    forged = Header(bundle="forged.1", generation="g1", queue=place.name, count=1, until=2e12)
    with (
        permitted(place.server, configure="^$", write=r"^amq\.default$", read="^$") as sender,
        pika.BlockingConnection(
            pika.ConnectionParameters(
                place.host,
                place.port,
                credentials=pika.PlainCredentials(sender["login"], sender["password"]),
            )
        ) as connection,
    ):
        channel = connection.channel()
        channel.confirm_delivery()
        held = Held("m", 1, False, b"\0\0", b"\0\0", b"forged")
        channel.basic_publish("", lease.state["holding_queue"], pack(forged, [held]))

    # When the run is settled
    report = place.carry_out(lease, settlement_of(messages, rest=ACK))

    # Then its own message is, and the forged one, in no manifest, is delivered like any other
    assert (report.acked, report.lapsed, report.failed) == (1, 0, 0)
    assert [message.data for message in place.settle("g2")[0]] == [b"forged"]
    assert place.depth(lease.state["holding_queue"]) == 0


def test_a_holding_queue_with_other_arguments_is_an_error(place):
    place.send(b"1")
    with place.channel() as channel:
        channel.queue_declare(place.queues.held(0), durable=True)

    with pytest.raises(ProducerError, match=r"held.*exists with other arguments"):
        run_once(place, "g1", **GUEST)

    assert place.depth(place.name) == 1


# -- the staging folder ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["journal", "lease"])
def test_a_lease_of_another_queue_is_not_settled(place, victim, where):
    # Given a run whose holding queue is replaced by another queue's name
    place.send(b"1")
    messages, lease = place.hold("g1")
    if where == "lease":
        lease = dataclasses.replace(lease, state={**lease.state, "holding_queue": victim})
        shutil.rmtree(place.folder / "rabbitmq")
    else:
        lease = dataclasses.replace(lease, state={**lease.state, "holding_queue": ""})
        QueueJournal(f"file://{place.folder}", place.name).note_opened("g1", victim, lease.deadline)
    with place.channel() as channel:
        channel.basic_publish("", victim, b"somebody's")

    # When it is settled by any verdict
    for settlement in (settlement_of(messages), Settlement(rest=RELEASE)):
        with pytest.raises(ProducerError, match=rf"'{victim}' is no holding queue of"):
            place.carry_out(lease, settlement)

    # Then the other queue is unchanged
    assert place.depth(victim) == 1


def test_forged_generation_names_block_no_connection(place, monkeypatch):
    # Given messages with marks of two generations, and others with copies of such marks
    proper = [marked(b"proper", f"m{n}", giver=f"giver-{n % 2}") for n in range(20)]
    copied = [marked(b"another", f"c{n}", giver=f"stranger-{n}") for n in range(50)]
    for headers in (*proper, *copied):
        place.send(b"proper", properties=pika.BasicProperties(headers=headers))
    original = QueueJournal.turns
    read: list[tuple[str, str]] = []

    def turns(journal: QueueJournal, generation: str) -> frozenset[str]:
        read.append((threading.current_thread().name, generation))
        return original(journal, generation)

    monkeypatch.setattr(QueueJournal, "turns", turns)

    messages, report = place.settle("g1")

    # Then each proper one's journal is read once, and not by the heartbeat thread
    assert report == SettleReport(acked=70)
    assert {f"m{n}" for n in range(20)} < {message.message_id for message in messages}
    assert all(message.redelivered for message in messages)
    this_thread = threading.current_thread().name
    assert sorted(read) == [(this_thread, "giver-0"), (this_thread, "giver-1")]
