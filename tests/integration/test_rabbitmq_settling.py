"""Settlement at a real RabbitMQ under faults: no message is lost, and every report is true.

Each message is counted independently of the report: in the queues.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pika
import pytest

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import bundle
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.channels import Publisher
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.properties import join_entries, join_fields
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueue
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.marks import MARK
from airflow_broadway.producers.rabbitmq.settle import settlement as settling
from airflow_broadway.producers.rabbitmq.settle.settlement import Outbox
from airflow_broadway.testing.contract import ids, settlement_of
from tests.rabbitmq_place import Breaker, Place

pytestmark = pytest.mark.broker

RETRY = Verdict(Action.RETRY, 0.0, "again", "process")
DEAD = Verdict(Action.DEAD_LETTER, 0.0, "why", "process")


@pytest.fixture
def place(place, monkeypatch):
    monkeypatch.setattr(settling, "COUNT_TIMEOUT", 0.3)
    return place


def hold(place: Place, generation: str, count: int, **options: Any) -> tuple[Lease, list[Message]]:
    """Sends ``count`` messages, and receives them."""
    place.send(*[b"%06d" % number for number in range(count)])
    with place.source(generation, **options) as source:
        messages = place.take(source)
        messages += source.stop()
        assert len(messages) == count
        return source.lease, messages


def drain_queue(place: Place, queue: str) -> Counter[bytes]:
    """Empties a queue; returns its bodies with their counts."""
    counts: Counter[bytes] = Counter()
    with place.channel() as channel:
        while True:
            method, _, body = channel.basic_get(queue, auto_ack=True)
            if method is None:
                return counts
            counts[body] += 1


def publish_raw(place: Place, queue: str, *sent: tuple[bytes, bytes]) -> None:
    """Publishes bodies with already encoded properties, if the queue exists."""
    connection = ConnectionThread(address_for(place.producer(), place.env()))
    publisher = Publisher(connection)
    for number, (body, properties) in enumerate(sent):
        publisher.publish("", queue, properties, body, key=str(number))
    publisher.flush()
    connection.close()


# -- concurrent settlements of a lease -------------------------------------------------------------


def test_concurrent_settlements_report_the_same(place, monkeypatch):
    # Given a settlement that stalls with half of the bundles read
    lease, messages = hold(place, "g1", 1_500)
    assert lease.state["bundles"] >= 3
    good, bad, open_ = messages[::3], messages[1::3], messages[2::3]
    chosen = dict.fromkeys(ids(good), ACK) | dict.fromkeys(ids(bad), DEAD)
    settlement = settlement_of(messages, chosen, RELEASE)
    stalled, resume = threading.Event(), threading.Event()
    original = bundle.unpack
    read = 0

    def unpack(body: bytes) -> Any:
        nonlocal read
        read += 1
        if read == lease.state["bundles"] // 2:
            stalled.set()
            assert resume.wait(60)
        return original(body)

    monkeypatch.setattr(bundle, "unpack", unpack)
    reports: list[SettleReport] = []

    def settle() -> None:
        reports.append(place.carry_out(lease, settlement))

    threads = [threading.Thread(target=settle) for _ in range(2)]
    threads[0].start()
    assert stalled.wait(60)

    # When another settles the same, and then the first resumes
    threads[1].start()
    threads[1].join(0.5)
    assert reports == []
    resume.set()
    for thread in threads:
        thread.join(60)

    # Then each message is settled once, by its verdict, and both report the same
    assert reports == [SettleReport(acked=500, dead_lettered=500, released=500)] * 2
    redelivered, _ = place.settle("g2")
    assert sorted(message.data for message in redelivered) == [message.data for message in open_]
    assert all(message.redelivered for message in redelivered)
    dead = drain_queue(place, place.queues.dead)
    assert dead == Counter(message.data for message in bad)


def test_settlement_removes_any_number_of_bundles(place, monkeypatch):
    # Given more bundles than the broker takes acknowledgements of at a time
    monkeypatch.setattr(bundle, "MAX_MESSAGES", 1)

    # When they are released, often enough for acknowledgements to be forgotten
    for turn in range(6):
        lease, _ = hold(place, f"g{turn}", 40)
        assert lease.state["bundles"] == 40
        assert place.carry_out(lease, Settlement(rest=RELEASE)) == SettleReport(released=40)

        # Then none of them is left
        assert drain_queue(place, lease.state["holding_queue"]) == {}
        drain_queue(place, place.name)


@pytest.mark.parametrize("damage", ["deleted", "emptied"])
def test_immediate_settlements_are_counted_without_their_bundles(place, damage):
    # Given messages that a callback settled, and a deleted or emptied holding queue
    lease, messages = hold(place, "g1", 10)
    settler = place.producer().custodian(place.env("custodian"))
    settler.settle_now(lease, [entry_of(message, ACK) for message in messages[:3]])
    settler.close()
    with place.channel() as channel:
        if damage == "deleted":
            channel.queue_delete(lease.state["holding_queue"])
        else:
            channel.queue_purge(lease.state["holding_queue"])

    # When the process that settled them died before it could record the third
    settlement = settlement_of(messages[2:], {messages[9].message_id: DEAD})
    report = place.carry_out(lease, replace(settlement, settled_now=SettleReport(acked=2)))

    # Then each is counted once
    assert report == replace(SettleReport(acked=7, dead_lettered=1), errors=ANY)
    assert drain_queue(place, place.queues.dead) == {b"000009": 1}


@pytest.mark.parametrize(("count", "held"), [(1, "1 message"), (3, "3 messages")])
def test_a_holding_queue_deleted_before_the_manifest_is_a_reported_loss(place, count, held):
    lease, _ = hold(place, "g1", count)
    with place.channel() as channel:
        channel.queue_delete(lease.state["holding_queue"])

    report = place.carry_out(lease, Settlement(rest=RELEASE))

    assert report.lapsed == count
    [error] = report.errors
    assert f"its messages are lost ({held})" in error


@pytest.mark.parametrize(("rest", "acked", "released"), [(ACK, 8, 0), (RELEASE, 1, 7)])
def test_an_emptied_holding_queue_is_settled_from_staging(place, rest, acked, released):
    # Given a holding queue that an operator has purged
    lease, messages = hold(place, "g1", 10)
    with place.channel() as channel:
        channel.queue_purge(lease.state["holding_queue"])

    # When three messages get their own verdicts, and the others the verdict ``rest``
    chosen = dict(zip(ids(messages), (DEAD, RETRY, ACK), strict=False))
    report = place.carry_out(lease, settlement_of(messages, chosen, rest))

    # Then they are published from staging, and the report names the difference
    counts = SettleReport(acked=acked, dead_lettered=1, requeued=1, released=released)
    assert report == replace(counts, errors=ANY)
    assert "emptied or deleted by hand" in report.errors[0]
    assert drain_queue(place, place.queues.dead) == {b"000000": 1}
    assert len(place.settle("g2")[0]) == 1 + released


@pytest.mark.parametrize("remaining", [0, 2])
def test_manually_removed_bundles_are_settled_from_staging(place, remaining, monkeypatch):
    # Given three bundles, of which an operator has removed all but the remaining ones
    monkeypatch.setattr(bundle, "MAX_MESSAGES", 5)
    lease, messages = hold(place, "g1", 15)
    queue = lease.state["holding_queue"]
    with place.channel() as channel:
        bodies = [channel.basic_get(queue, auto_ack=True)[2] for _ in range(4)]
        for body in bodies[: 1 + remaining]:
            channel.basic_publish("", queue, body)

    report = place.carry_out(lease, settlement_of(messages, {messages[14].message_id: DEAD}))

    assert report == replace(SettleReport(acked=14, dead_lettered=1), errors=ANY)
    assert f"{3 - remaining} of 3 bundles w" in report.errors[0]
    assert drain_queue(place, place.queues.dead) == {b"000014": 1}
    assert place.depth(queue) == 0


def test_uncounted_bundles_are_reported_at_the_purge(place, monkeypatch):
    # Given a bundle that arrives between the last count of the holding queue and its purge
    lease, messages = hold(place, "g1", 3)
    original = HoldingQueue.purge

    def purge(self: HoldingQueue) -> int:
        publish_raw(place, self.name, (b"one more", b"\x00\x00"))
        return original(self)

    monkeypatch.setattr(HoldingQueue, "purge", purge)

    report = place.carry_out(lease, settlement_of(messages))

    # Then the report names it, now and when repeated
    assert report.acked == 3
    assert "held 2 bundles when it was purged, and 1 were expected" in report.errors[0]
    assert place.carry_out(lease, settlement_of(messages)) == report


def test_an_extra_bundle_prevents_the_purge(place):
    lease, messages = hold(place, "g1", 3)
    queue = lease.state["holding_queue"]
    publish_raw(place, queue, (b"no bundle", b"\x00\x00"))

    report = place.carry_out(lease, settlement_of(messages))

    assert report.acked == 3
    assert "is no bundle" in report.errors[0]
    assert drain_queue(place, queue) == {b"no bundle": 1}


# -- one message that cannot be settled ------------------------------------------------------------


def test_an_unpublishable_message_fails_alone(place, monkeypatch):
    # Given a message that no client can encode
    lease, messages = hold(place, "g1", 3)
    original = Outbox._properties

    def properties(self: Outbox, held: Any, *rest: Any) -> bytes:
        if held.body == b"000001":
            raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
        return original(self, held, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "_properties", properties)
        report = place.carry_out(lease, settlement_of(messages, dict.fromkeys(ids(messages), DEAD)))

    # Then its neighbours are settled, it is redelivered unchanged, and the report has the reason
    assert (report.dead_lettered, report.failed) == (2, 1)
    assert "UnicodeEncodeError" in report.errors[0]
    assert messages[1].message_id in report.errors[0]
    assert drain_queue(place, place.queues.dead) == {b"000000": 1, b"000002": 1}
    assert ids(place.settle("g2")[0]) == [messages[1].message_id]


def test_an_incomplete_release_is_completed_by_the_next_sweep(place, monkeypatch):
    # Given a settlement that cannot publish two messages of a bundle
    lease, messages = hold(place, "g1", 4)
    original, broken = Outbox._properties, {b"000001", b"000002"}

    def properties(self: Outbox, held: Any, *rest: Any) -> bytes:
        if held.body in broken:
            raise ProducerError("not now")
        return original(self, held, *rest)

    monkeypatch.setattr(Outbox, "_properties", properties)
    report = place.carry_out(lease, settlement_of(messages, dict.fromkeys(ids(messages), DEAD)))
    assert (report.dead_lettered, report.failed) == (2, 2)

    # When one of them can be published by the next run, and the other by the run after it
    broken.remove(b"000001")
    second, _ = place.settle("g2")
    broken.clear()
    third, _ = place.settle("g3")

    # Then each is received once, and the holding queue is free
    assert [message.data for message in second] == [b"000001"]
    assert [message.data for message in third] == [b"000002"]
    assert drain_queue(place, place.queues.dead) == {b"000000": 1, b"000003": 1}
    assert place.depth(lease.state["holding_queue"]) == 0


def test_an_unpublishable_message_without_bundle_is_not_settled(place, monkeypatch):
    # Given a message whose bundle an operator has removed, and that cannot be published
    lease, messages = hold(place, "g1", 2)
    with place.channel() as channel:
        channel.queue_purge(lease.state["holding_queue"])
    settlement = settlement_of(messages, {messages[0].message_id: DEAD})

    def properties(*_: Any) -> bytes:
        raise ProducerError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "_properties", properties)
        with pytest.raises(
            ProducerError, match=r"removed by hand .* nothing was settled: .*not now"
        ):
            place.carry_out(lease, settlement)

    # Then it is settled once it can be
    assert place.carry_out(lease, settlement).dead_lettered == 1


@pytest.mark.parametrize("verdict", [RETRY, DEAD], ids=["retry", "dead letter"])
def test_oversized_headers_fail_alone(place, verdict):
    # Given headers as large as a frame, and small integers that would grow if encoded again
    text = b"S" + (131_000).to_bytes(4, "big") + b"x" * 131_000
    small = b"A" + (100_000).to_bytes(4, "big") + b"b\x07" * 50_000
    publish_raw(
        place,
        place.name,
        (b"full", join_fields({"headers": join_entries([(b"text", text)])})),
        (b"small", join_fields({"headers": join_entries([(b"small", small)])})),
    )
    place.send(b"plain")

    # When all are retried or dead-lettered
    first, report = place.settle("g1", dict.fromkeys(range(3), verdict))

    # Then all are; of the retries, the one without room for its mark is a dead letter
    assert sorted(message.data for message in first) == [b"full", b"plain", b"small"]
    assert report.failed == 0
    if verdict is RETRY:
        assert (report.requeued, report.dead_lettered) == (2, 1)
        retried, _ = place.settle("g2", metadata=["headers"])
        assert {(m.data, m.attempt, m.message_id) for m in retried} == {
            (m.data, 2, m.message_id) for m in first if m.data != b"full"
        }
        assert next(m for m in retried if m.data == b"small").metadata["headers"] == {
            "small": [7] * 50_000
        }
        assert set(drain_queue(place, place.queues.dead)) == {b"full"}
    else:
        assert report.dead_lettered == 3
        assert set(drain_queue(place, place.queues.dead)) == {b"full", b"plain", b"small"}


# -- original properties ---------------------------------------------------------------------------


def test_a_retried_message_keeps_its_route_and_its_sender(place):
    # Given a message with a route, a sender and a death of its own
    exchange = f"{place.name}-shop"
    death = [{"queue": "elsewhere", "reason": "expired", "count": 1}]
    with place.channel() as channel:
        channel.exchange_declare(exchange, "topic")
        channel.queue_bind(place.name, exchange, "orders.#")
        channel.confirm_delivery()
        channel.basic_publish(
            exchange,
            "orders.eu.created",
            b"order",
            pika.BasicProperties(
                user_id="guest", expiration="600000", headers={"x-death": death, "colour": "red"}
            ),
        )
    options: dict[str, Any] = {
        "metadata": ["exchange", "routing_key", "user_id", "headers", "persistent"]
    }
    late = Verdict(Action.RETRY, 1.0, "later", "process")

    # When it is retried immediately, then after a delay, and finally dead-lettered
    [first], _ = place.settle("g1", {0: RETRY}, **options)
    [second], _ = place.settle("g2", {0: late}, **options)
    third: list[Message] = []
    while not third:
        third, lease = place.hold("g3", **options)
    place.carry_out(lease, settlement_of(third, {third[0].message_id: DEAD}), **options)

    # Then its metadata is the original each time
    assert first.metadata["routing_key"] == "orders.eu.created"
    assert first.metadata["headers"] == {"x-death": death, "colour": "red"}
    assert dict(first.metadata) == dict(second.metadata) == dict(third[0].metadata)
    assert [message.attempt for message in (first, second, *third)] == [1, 2, 3]
    dead_letter = place.first(place.queues.dead)
    headers = dead_letter[0].headers
    assert (headers["x-broadway-reason"], headers["x-broadway-stage"]) == ("why", "process")
    assert headers["x-broadway-queue"] == place.name
    original = headers["x-broadway-original"]
    assert (original["exchange"], original["routing_key"]) == (exchange, "orders.eu.created")
    assert (original["user_id"], original["expiration"]) == ("guest", "600000")
    assert original["x-death"] == death


def test_a_requeued_dead_letter_starts_with_fresh_attempts(place):
    place.send(b"1")
    place.settle("g1", {0: RETRY})
    [second], _ = place.settle("g2", {0: DEAD})
    dead_letter = place.first(place.queues.dead)
    assert dead_letter[0].headers["x-broadway-attempt"] == second.attempt == 2

    place.send(dead_letter[1], properties=dead_letter[0])
    [requeued], _ = place.settle("g3", metadata=["headers"])

    assert (requeued.message_id, requeued.attempt) == (second.message_id, 1)
    assert requeued.redelivered
    assert not any(name.startswith("x-broadway") for name in requeued.metadata["headers"] or ())


def test_a_copied_header_is_no_duplicate(place):
    # Given a retried message, and two others with its headers, one of them with its body too
    place.send(b"ping")
    [first], _ = place.settle("g1", {0: RETRY})
    retried = place.first(place.name)
    assert MARK in retried[0].headers
    place.send(b"ping", b"ping", b"pong", properties=retried[0])

    messages, report = place.settle("g2")

    assert sorted(message.data for message in messages) == [b"ping", b"ping", b"pong"]
    assert len(set(ids(messages))) == 3
    assert sum(message.message_id == first.message_id for message in messages) == 1
    assert next(m for m in messages if m.data == b"pong").attempt == 1
    assert all(message.redelivered for message in messages)
    assert report == SettleReport(acked=3)


def test_a_retry_published_twice_is_handled_once(place, monkeypatch):
    # Given a settlement that is killed when it has published a retry and a dead letter
    lease, messages = hold(place, "g1", 3)
    chosen = {messages[0].message_id: RETRY, messages[1].message_id: DEAD}

    def killed(*_: Any, **__: Any) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(QueueJournal, "note_settled", killed)
        with pytest.raises(SystemExit):
            place.carry_out(lease, settlement_of(messages, chosen))

    # When it is repeated
    report = place.carry_out(lease, settlement_of(messages, chosen))

    # Then the retry is received once, and the second dead letter is marked
    assert report == SettleReport(acked=1, requeued=1, dead_lettered=1)
    redelivered, _ = place.settle("g2")
    assert ids(redelivered) == [messages[0].message_id]
    dead = [place.get(place.queues.dead) for _ in range(2)]
    marked = [
        bool(message and message[0].headers.get("x-broadway-redelivered")) for message in dead
    ]
    assert marked == [False, True]


# -- a broker that cannot be reached ---------------------------------------------------------------


def test_settlement_without_backoff_reports_an_unreachable_broker(place):
    lease, messages = hold(place, "g1", 1)
    nowhere: dict[str, Any] = {"uri": "amqp://127.0.0.1:1", "backoff_type": "stop"}

    with pytest.raises(ProducerUnavailable, match="cannot be reached"):
        place.carry_out(lease, settlement_of(messages), **nowhere)

    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=1)


def test_a_settlement_reconnects(place):
    # Given a connection that breaks as a dead letter is published
    lease, messages = hold(place, "g1", 3)
    chosen = {messages[0].message_id: DEAD, messages[1].message_id: RETRY}
    with Breaker(place.server.address) as breaker:
        options = {"uri": f"amqp://127.0.0.1:{breaker.port}", "backoff_min": 0.01}
        breaker.arm(b"x-broadway-reason")

        report = place.carry_out(lease, settlement_of(messages, chosen), **options)
        assert breaker.broken == 1

    # Then the rest of it is settled, and each message is in its queue
    assert report == SettleReport(acked=1, dead_lettered=1, requeued=1)
    assert drain_queue(place, place.queues.dead) == {b"000000": 1}
    assert [message.data for message in place.settle("g2")[0]] == [b"000001"]


# -- dead letters to an exchange -------------------------------------------------------------------


def test_dead_letters_to_an_exchange_keep_their_own_key(place):
    exchange, queue = f"{place.name}-dlx", f"{place.name}-parked"
    with place.channel() as channel:
        channel.exchange_declare(exchange, "topic")
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, exchange, place.name)
    place.send(b"1")

    _, report = place.settle("g1", {0: DEAD}, dead_letter={"exchange": exchange})

    assert report == SettleReport(dead_lettered=1)
    assert drain_queue(place, queue) == {b"1": 1}


def test_a_missing_exchange_is_an_error_before_the_first_receive(place):
    place.send(b"1")
    options: dict[str, Any] = {"dead_letter": {"exchange": f"{place.name}-none"}}

    with (
        place.source("g1", **options) as source,
        pytest.raises(ProducerError, match=r"exchange .* of dead letters.*NOT_FOUND"),
    ):
        source.receive(10, timeout=1.0)

    assert len(place.settle("g2")[0]) == 1


def test_a_deleted_exchange_fails_only_its_dead_letters(place):
    lease, messages = hold(place, "g1", 3)
    chosen = {messages[0].message_id: DEAD, messages[1].message_id: RETRY}
    options: dict[str, Any] = {"dead_letter": {"exchange": f"{place.name}-none"}}

    report = place.carry_out(lease, settlement_of(messages, chosen), **options)

    assert (report.acked, report.requeued, report.failed) == (1, 1, 1)
    assert "NOT_FOUND" in report.errors[0]
    assert len(place.settle("g2")[0]) == 2
