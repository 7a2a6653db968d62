"""A source that stops in traffic: every message is secured and reported, or released."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pika
import pytest

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.protocol import Settlement, Source
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerUnavailable
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import RateLimiting
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.stages.receiving import Budget, Receiving
from airflow_broadway.producers.rabbitmq import Qos
from airflow_broadway.producers.rabbitmq.receive import source as receiving
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_place import Breaker, Place
from tests.waiting import eventually

pytestmark = pytest.mark.broker

#: The content type in frames that publish a bundle.
BUNDLE = b"application/x-broadway-bundle"
#: Class and method ids of ``basic.ack``, as in its frame; from the broker, it is a confirm.
BASIC_ACK = b"\x00\x3c\x00\x50"


@pytest.fixture
def place(place, monkeypatch):
    monkeypatch.setattr(receiving, "_CLOSE_TIMEOUT", 0.2)
    return place


@contextmanager
def sender(place: Place) -> Iterator[list[bytes]]:
    """Publishes without a pause; the list of bodies is complete once the block has ended."""
    sent: list[bytes] = []
    end = threading.Event()

    def send() -> None:
        with place.channel() as channel:
            channel.confirm_delivery()
            while not end.is_set():
                body = b"%06d" % len(sent)
                channel.basic_publish("", place.name, body, pika.BasicProperties())
                sent.append(body)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        end.set()
        thread.join()


def bodies(messages: list[Message]) -> list[bytes]:
    return [message.data for message in messages]


def stop_after(seconds: float) -> Callable[[], str]:
    began = time.monotonic()
    return lambda: "signal" if time.monotonic() - began > seconds else ""


@pytest.mark.parametrize(
    ("budget", "more"),
    [
        (Budget(max_messages=300, wait_seconds=5.0), {}),
        (Budget(max_seconds=0.6, wait_seconds=5.0), {}),
        (Budget(max_bytes=1_000, wait_seconds=5.0), {}),
        (Budget(wait_seconds=5.0), {"stop": 0.6}),
        (Budget(max_seconds=0.8, wait_seconds=5.0), {"rate": (200, 10_000)}),
    ],
    ids=["max_messages", "max_seconds", "max_bytes", "stop reason", "rate limit"],
)
def test_a_run_ending_in_traffic_loses_nothing(place, budget, more):
    options: dict[str, Any] = {"on_failure": "retry"}
    clock = SystemClock()
    rate = more.get("rate")
    limiting = None if rate is None else RateLimiting(allowed_messages=rate[0], interval=rate[1])

    taken: list[Message] = []

    def accept(messages: Sequence[Message]) -> Sequence[Message]:
        taken.extend(messages)
        return messages

    with sender(place) as sent, place.source(**options) as source:
        intake = Receiving(
            source,
            budget,
            clock=clock,
            limiter=RateLimiter(limiting, clock),
            demand=1_000,
            accept=accept,
            stop_reason=stop_after(more["stop"]) if "stop" in more else lambda: "",
        )
        for _ in intake:
            time.sleep(0.02)  # callbacks
        intake.stop()
        lease = source.lease
        time.sleep(0.2)  # staging, while more messages arrive
        assert source.lease == lease
        assert lease.state["messages"] == len(taken) == intake.received
        assert not lease.state["extra"]
        report = place.carry_out(lease, settlement_of(taken), **options)

    assert taken
    assert report == SettleReport(acked=len(taken))
    rest = place.settle("the rest", **options)[0]
    assert sorted([*bodies(taken), *bodies(rest)]) == sent
    assert not any(message.redelivered for message in taken)


# -- late and missing confirms ---------------------------------------------------------------------


@pytest.fixture
def breaker(place):
    with Breaker(place.server.address) as proxy:
        yield proxy


def one_second_options(place: Place, breaker: Breaker) -> dict[str, Any]:
    """Returns options of a source that waits for a second at most."""
    return {"uri": f"{breaker.uri}?connection_timeout=1", "on_failure": "retry"}


def receive_unconfirmed(source: Any) -> None:
    """Receives until a bundle stays unconfirmed, and its error is raised."""

    def receive() -> None:
        for _ in range(100):
            assert not source.receive(10, timeout=0.2)

    with pytest.raises(ProducerUnavailable, match="does not confirm"):
        receive()


@pytest.mark.parametrize(
    ("released", "lapses"),
    [(False, False), (False, True), (True, False)],
    ids=["confirm too late", "lapsed lease", "released before"],
)
def test_a_confirm_after_the_stop_acknowledges_nothing(place, breaker, released, lapses):
    (place.send_released if released else place.send)(b"1", b"2")
    with place.source(**one_second_options(place, breaker)) as source:
        breaker.hold(BUNDLE)
        if lapses:
            lapse_while_receiving(source, breaker.holds.wait)
        else:
            receive_unconfirmed(source)

        assert list(source.stop()) == []
        lease = source.lease
        breaker.release()
        eventually(lambda: place.depth(lease.state["holding_queue"]) == 2)
        time.sleep(0.1)  # until its confirm has reached the source

        assert lease.state["messages"] == lease.state["bundles"] == 0
        assert lease.state["extra"] == 1
        assert source.lease == lease

    # Then all messages are redelivered, marked
    place.carry_out(lease, Settlement(rest=RELEASE))
    rest = place.settle("the rest")[0]
    assert set(bodies(rest)) == {b"1", b"2"}
    assert all(message.redelivered for message in rest)


def test_messages_are_acknowledged_after_their_bundle_is_confirmed(place, breaker):
    # Given a broker that receives every bundle, and whose confirms do not arrive
    sent = [b"%d" % number for number in range(5)]
    place.send(b"first")
    with place.source(**one_second_options(place, breaker)) as source:
        assert len(source.receive(1, timeout=5.0)) == 1
        place.send(*sent)
        breaker.hold(BASIC_ACK, answer=True)
        receive_unconfirmed(source)
        assert breaker.holds.is_set()
        assert list(source.stop()) == []
        lease = source.lease
        breaker.release()

    # Then the received messages are still in their queue, even once the bundles are purged
    with place.channel() as channel:
        assert channel.queue_purge(lease.state["holding_queue"]).method.message_count == 3
    assert place.depth(place.name) == 5
    assert sorted(bodies(place.settle("the rest")[0])) == sent


def test_a_connection_lost_while_stopping_loses_nothing(place, breaker):
    place.send(b"1")
    options: dict[str, Any] = {"uri": breaker.uri, "on_failure": "retry"}
    with place.source(**options, qos=Qos(prefetch_count=2)) as source:
        [first] = source.receive(10, timeout=5.0)
        breaker.arm(BUNDLE)
        place.send(b"2", b"3")
        # The demand is not met, so they are received, and the connection breaks.
        eventually(lambda: breaker.broken == 1)

        assert list(source.stop()) == []
        assert list(source.stop()) == []
        lease = source.lease
    assert lease.state["messages"] == lease.state["bundles"] == 1
    assert lease.state["extra"] == 1
    assert place.carry_out(lease, settlement_of([first])) == SettleReport(acked=1)
    assert sorted(bodies(place.settle("the rest")[0])) == [b"2", b"3"]


def lapse_while_receiving(source: Any, *until: Callable[[], object]) -> None:
    """Receives; ends the lease after the calls of ``until``, as a lapse would."""

    def lapse() -> None:
        for wait in until:
            wait()
        source._buffer.fail(LeaseLapsed("of the test"))

    lapsing = threading.Thread(target=lapse)
    lapsing.start()
    with pytest.raises(LeaseLapsed):
        source.receive(100, timeout=30.0)
    lapsing.join()


def test_a_stopped_source_leaves_no_unacknowledged_message(place):
    place.send(*[b"%d" % number for number in range(50)])
    with place.source() as source:
        taken = [*source.receive(5, timeout=5.0), *source.receive(1, timeout=5.0), *source.stop()]

        # While the source is still open, others receive the remaining messages.
        rest = place.settle("another")[0]
        assert len(taken) + len(rest) == 50
        lease = source.lease
    assert place.carry_out(lease, settlement_of(taken)) == SettleReport(acked=len(taken))


# -- the order of acknowledgements -----------------------------------------------------------------


def test_a_quarantined_message_acknowledges_no_earlier_ones(place, breaker):
    # Given a broker that receives the bundle of the earlier messages late
    place.send(*[b"%d" % number for number in range(40)], b"x" * 2_000)
    with place.source(**one_second_options(place, breaker), max_message_bytes=1_000) as source:
        breaker.hold(BUNDLE)
        lapse_while_receiving(source, breaker.holds.wait)
        assert list(source.stop()) == []
        breaker.release()

    # Then all of them are in their queue
    eventually(lambda: place.depth(place.name) == 41)


# -- unexpected errors -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(75, "Value too large"), KeyError("x")])
def test_an_unexpected_error_closes_the_connection_and_is_raised(place, monkeypatch, error):
    from airflow_broadway.producers.rabbitmq import marks

    def broken(properties: bytes) -> None:
        raise error

    place.send(b"1", b"2")
    source: Source = place.producer().source(place.env())
    with monkeypatch.context() as patch:
        patch.setattr(marks, "mark_of", broken)
        with pytest.raises(BroadwayError, match=f"an unexpected .*{type(error).__name__}"):
            source.receive(10, timeout=5.0)

    # The source is still open, and others receive the messages that were sent to it.
    assert sorted(bodies(place.settle("another")[0])) == [b"1", b"2"]
    assert list(source.stop()) == []
    source.close()


def test_a_source_stopped_before_receiving_holds_nothing(place):
    place.send(b"1")
    with place.source() as source:
        assert list(source.stop()) == []
        assert list(source.receive(10, timeout=1.0)) == []
        assert source.lease.state["messages"] == 0
    assert bodies(place.settle("another")[0]) == [b"1"]
