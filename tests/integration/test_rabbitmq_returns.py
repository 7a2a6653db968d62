"""The returns queue of a real RabbitMQ: what comes back, and what others put there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pika
import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kit.state_files import StateFiles
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.bundle import VERSION, Header, Held, pack
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_place import Breaker, Place, marked

pytestmark = pytest.mark.broker


@pytest.fixture
def place(place: Place) -> Place:
    place.declare()
    return place


def put_into_returns(place: Place, *bodies: bytes, properties: Any = None) -> None:
    """Do what anybody may who may publish by the default exchange."""
    with place.channel() as channel:
        channel.queue_declare(
            place.queues.returns, durable=True, arguments=place.queues.returns_arguments()
        )
        channel.confirm_delivery()
        for body in bodies:
            channel.basic_publish("", place.queues.returns, body, properties)


def quarantined(place: Place) -> Iterator[tuple[Any, bytes]]:
    while (found := place.get(place.queues.quarantine)) is not None:
        yield found


NEWER = b"AFBW\x09\x00\x00\x00\x02{}"
GARBAGE = [
    b"",
    b"garbage",
    NEWER,
    b"AFBW" + struct.pack(">BI", VERSION, 4) + b"[[[[",
    b"x" * 100_000,
]


def test_what_cannot_be_read_is_moved_away_and_dams_nothing(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    put_into_returns(place, *GARBAGE, properties=pika.BasicProperties(app_id="a stranger"))
    sent = place.give_back(*[b"%d" % number for number in range(100)])

    messages, report = place.settle("g1")

    assert sorted(m.message_id for m in messages) == sorted(m.message_id for m in sent)
    assert report == SettleReport(acked=100)
    moved = list(quarantined(place))
    assert sorted(body for _, body in moved) == sorted(GARBAGE)
    for properties, _ in moved:
        assert properties.app_id == "a stranger"
        assert properties.headers["x-broadway-reason"]
    assert "format version 9" in caplog.text
    assert place.queues.quarantine in caplog.text
    assert place.get(place.queues.returns) is None


def test_headers_that_pika_cannot_read_are_moved_away_too(place: Place) -> None:
    from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
        ConnectionThread,
        raw_properties,
    )

    put_into_returns(place)
    table = b"\x02\xff\xfet\x01"
    raw = b"\x20\x00" + struct.pack(">I", len(table)) + table
    connection = ConnectionThread(address_for(place.producer(), place.env()))
    channel = connection.channel()
    queue = place.queues.returns
    connection.post(lambda: channel.raw.basic_publish("", queue, b"odd", raw_properties(raw)))
    channel.flush_and_close()
    connection.close()
    sent = place.give_back(b"1")

    messages, _ = place.settle("g1")

    assert [m.message_id for m in messages] == [m.message_id for m in sent]
    assert place.depth(place.queues.quarantine) == 1


def forged(place: Place, **staged: Any) -> bytes:
    header = Header(
        bundle="ab.1", generation="g0", queue=place.name, count=1, staged={"bytes": 1, **staged}
    )
    return pack(header, [])


@pytest.mark.parametrize("path", ["/dev/zero", "/etc/passwd", "../../etc/passwd", "secret"])
def test_a_forged_bundle_makes_nobody_read_what_it_names(
    place: Place, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateFiles, "get", lambda notes, name: pytest.fail(f"read {name}"))
    put_into_returns(place, forged(place, path=path, sha256="0" * 64))

    messages, _ = place.settle("g1", custody="staged")

    assert messages == []
    assert len(list(quarantined(place))) == 1


def test_a_staged_bundle_is_read_only_if_it_has_the_size_that_was_noted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"custody": "staged"}
    place.send(b"1")
    taken, lease = place.hold("before", **options)
    assert len(taken) == 1
    [file] = place.folder.rglob("*.bundle")
    file.write_bytes(file.read_bytes() + b"more")
    monkeypatch.setattr(StateFiles, "get", lambda notes, name: pytest.fail(f"read {name}"))

    # As it lapses, or is read when it is settled
    body = place.first(lease.state["lease_queue"])
    put_into_returns(place, body[1])
    messages, _ = place.settle("g1", **options)

    assert messages == []
    [(properties, _)] = quarantined(place)
    assert "is not what was written" in properties.headers["x-broadway-reason"]


def test_returned_messages_come_though_the_broker_is_far_and_nobody_waits(place: Place) -> None:
    sent = place.give_back(*[b"%d" % number for number in range(10)])

    with (
        Breaker(place.server.address, delay=0.03) as breaker,
        place.source(uri=breaker.uri, on_failure="retry") as source,
    ):
        messages = source.receive(100, timeout=0.0)

    assert sorted(m.message_id for m in messages) == sorted(m.message_id for m in sent)


def test_a_run_that_asks_for_little_at_a_time_takes_all_that_came_back(place: Place) -> None:
    sent = place.give_back(*[b"%d" % number for number in range(100)])

    # When a run asks for seven at a time, until nothing more comes
    messages: list[Message] = []
    with place.source("g1") as source:
        while got := source.receive(7, timeout=0.3):
            assert len(got) <= 7
            messages += got
        assert list(source.stop()) == []
        lease = source.lease
    report = place.carry_out(lease, settlement_of(messages))

    # Then it has all, each once
    assert sorted(m.message_id for m in messages) == sorted(m.message_id for m in sent)
    assert report == SettleReport(acked=100)
    assert place.get(place.queues.returns) is None


@pytest.mark.parametrize("demand", [1_000, 250])
def test_one_run_takes_all_returned_bundles_though_the_queue_is_full_and_filled(
    place: Place, demand: int
) -> None:
    # Given twenty bundles of dead generations, and more messages in the queue than a run takes
    bundles = [
        pack(
            Header(bundle=f"ab.{n}", generation="g0", queue=place.name, count=500, released=True),
            [Held(f"r{n}-{m}", 1, True, b"\0\0", b"\0\0", b"returned") for m in range(500)],
        )
        for n in range(20)
    ]
    put_into_returns(place, *bundles)
    with place.channel() as channel:
        for _ in range(15_000):
            channel.basic_publish("", place.name, b"fresh")

    # When one run takes 20,000 messages, beside a publisher
    messages: list[Message] = []
    ended = threading.Event()
    publisher = threading.Thread(target=publish_until, args=(place, ended))
    publisher.start()
    try:
        with place.source("g1") as source:
            while len(messages) < 20_000:
                messages += source.receive(min(demand, 20_000 - len(messages)), timeout=1.0)
            assert list(source.stop()) == []
            lease = source.lease
    finally:
        ended.set()
        publisher.join()

    # Then all that came back is taken first, and what is new has the rest
    returned = [m.message_id for m in messages[:10_000]]
    assert sorted(returned) == sorted(f"r{n}-{m}" for n in range(20) for m in range(500))
    assert place.get(place.queues.returns) is None
    assert place.carry_out(lease, settlement_of(messages)) == SettleReport(acked=20_000)


def publish_until(place: Place, ended: threading.Event) -> None:
    with place.channel() as channel:
        while not ended.wait(0.001):
            channel.basic_publish("", place.name, b"fresh")


def test_an_id_from_the_returns_queue_is_not_given_to_another_message(place: Place) -> None:
    # Given a message that was given back, and others that bear a copy of its mark
    copied = pika.BasicProperties(headers=marked(b"same", "copied"))
    [first] = place.give_back(b"same", properties=copied)
    place.send(b"same", b"other", b"same", properties=copied)

    # When one run takes them all, and only the first of them succeeds
    retry = Verdict(Action.RETRY, 0.0, "again", "process")
    messages, report = place.settle("g1", {1: retry, 2: retry, 3: retry})

    # Then each is a message of its own, with a verdict of its own
    assert first.message_id == "copied"
    assert sorted(message.data for message in messages) == [b"other", b"same", b"same", b"same"]
    assert len({message.message_id for message in messages}) == 4
    assert report == SettleReport(acked=1, requeued=3)
    assert len(place.settle("g2")[0]) == 3


def test_a_run_leaves_bundles_that_another_run_has_taken(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    sent = place.give_back(*[b"%d" % number for number in range(10)])
    caplog.set_level(logging.WARNING)

    with place.source("g1") as one, place.source("g2") as two:
        left = len(sent)
        while left:
            taken = one.receive(100, timeout=5.0)
            assert taken
            left -= len(taken)
        assert list(two.receive(100, timeout=0.2)) == []


def test_the_digest_of_a_staged_bundle_is_what_its_reference_says(place: Place) -> None:
    place.send(b"1", b"2")
    taken, lease = place.hold("before", custody="staged")
    assert len(taken) == 2
    [file] = place.folder.rglob("*.bundle")
    body = place.first(lease.state["lease_queue"])
    length = struct.unpack_from(">I", body[1], 5)[0]
    header = Header(**json.loads(body[1][9 : 9 + length]))
    assert dataclasses.asdict(header)["staged"] == {
        "path": str(file),
        "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
