"""Queues that vanish or refuse: the holding queue, the source."""

from __future__ import annotations

import time
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq.broker.holding_queues import KEEPING
from tests.faults.found import Found
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_cases.registry import case

_AGAIN = Verdict(Action.RETRY, 0.0, "once more", "process")


# -- the holding queue -----------------------------------------------------------------------------


@case(slow=False)
def the_holding_queue_is_deleted_in_transfer(place: Place, name: str) -> Found:
    place.fill(4_000)
    source = place.source("g1")
    try:
        first = place.take(source, 1_000)
        place.delete(place.holding_queue("g1"))
        with pytest.raises(LeaseLapsed, match="accepts no more messages"):
            place.take(source)
        lease = source.lease
    finally:
        source.close()

    # It was deleted with what it held, by an operator and before anything was published: that is
    # lost, counted and reported.  All else is still the source's.
    report = place.settle(lease, Settlement(rest=RELEASE))
    assert report.lapsed == lease.state["messages"], (report, lease.state)
    assert "emptied or deleted by hand" in report.errors[0]
    taken = {int(message.data) for message in first}
    kept = set(place.rest())
    assert kept >= set(range(4_000)) - taken
    assert 4_000 - len(kept) <= report.lapsed

    result = place.found(name, 4_000)
    value = result.lost[: report.lapsed]
    result.lost = result.lost[report.lapsed :]
    result.told_lost = len(value)
    return result


@case()
def the_holding_queue_is_deleted_after_the_manifest(place: Place, name: str) -> Found:
    place.fill(900)
    lease, messages = place.hold("g1")
    place.delete(place.holding_queue("g1"))

    released = dict.fromkeys((message.message_id for message in messages[:100]), RELEASE)
    report = place.settle_all(lease, messages, released)

    assert (report.acked, report.released, report.lapsed) == (800, 100, 0), report
    assert place.rest() == list(range(100))
    return place.found(name, 900)


@case()
def the_holding_queue_refuses(place: Place, name: str) -> Found:
    place.fill(4_000)
    handed = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KEEPING, "x-max-length", 3)
        source = place.source("g1")
        with pytest.raises(BroadwayError, match="accepts no more messages"):  # noqa: PT012
            while True:
                handed += len(place.receive(source))
        lease = source.lease
        source.close()
        assert handed < 4_000
        place.settle(lease, Settlement(rest=RELEASE))
    for queue in (place.queues.held(0), place.queues.dead):
        place.delete(queue)  # declared with that bound, and empty

    assert place.rest() == list(range(4_000))
    return place.found(name, 4_000)


@case()
def the_holding_queue_is_deleted_after_a_death(place: Place, name: str) -> Found:
    """An operator deletes it once it is empty: the next run declares it again."""
    place.producer = place.producer_of(lease=3.0)
    place.fill(1_000)
    place.hold("g1")
    time.sleep(3.0)
    place.producer = place.producer_of(lease=30.0)
    source = place.source("sweeps")
    source.close()
    place.delete(place.queues.held(0))

    assert place.rest() == list(range(1_000))
    return place.found(name, 1_000)


# -- the source queue ------------------------------------------------------------------------------


@case()
def the_source_queue_is_deleted_in_transfer(place: Place, name: str) -> Found:
    place.fill(3_000)
    source = place.source("g1")
    messages: list[Message] = []
    try:
        messages += place.take(source, 1_000)
        place.delete(place.queue)
        with pytest.raises(ProducerError, match=place.queue):  # noqa: PT012
            for _ in range(100):
                messages += place.receive(source)
        lease = source.lease
    finally:
        source.close()

    # What was secured is held still; the rest went with the queue, which was the operator's.
    report = place.settle_all(lease, messages)
    assert report.acked == len(messages), report
    result = place.found(name, 3_000)
    assert len(result.lost) == 3_000 - len(messages)
    result.told_lost, result.lost = len(result.lost), []
    return result


@case()
def the_source_queue_is_full_when_messages_go_back(place: Place, name: str) -> Found:
    place.fill(20, kind="quorum", **{"x-max-length": 20, "x-overflow": "reject-publish"})
    lease, messages = place.hold("g1")
    _fill_up(place)
    verdicts = dict.fromkeys((message.message_id for message in messages[:5]), _AGAIN)

    report = place.settle_all(lease, messages, verdicts)

    # What the queue refuses stays in the holding queue: failed to settle, not lost.
    assert (report.acked, report.requeued + report.failed) == (15, 5), report
    assert report.failed > 0
    back = place.rest()
    assert [number for number in back if number < 20] == sorted(
        int(message.data) for message in messages[:5]
    )
    return place.found(name, 20)


def _fill_up(place: Place) -> None:
    with place.channel() as channel:
        for number in range(25):  # rejected messages do not count
            channel.basic_publish("", place.queue, b"%d" % (1_000 + number))


@case()
def the_source_queue_has_a_ttl_and_a_dead_letter_cycle(place: Place, name: str) -> Found:
    """Messages have gone round: rejected to a parking queue, whose TTL sends them back."""
    count, ttl = 600, 6.0
    parked = f"{place.queue}-parked"
    with place.channel() as channel:
        channel.queue_declare(
            parked,
            durable=True,
            arguments={
                "x-message-ttl": 300,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": place.queue,
            },
        )
    cycle: dict[str, Any] = {
        "x-message-ttl": int(ttl * 1000),
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": parked,
    }
    place.fill(count, **cycle)
    with place.channel() as channel:
        for number, (method, _, _) in enumerate(channel.consume(place.queue), 1):
            channel.basic_reject(method.delivery_tag, requeue=False)
            if number == count:
                break
    while place.count(place.queue) < count:
        time.sleep(0.1)

    # The lease outlasts the queue's TTL; what goes back gets a TTL of its own, and no history of
    # deaths for which the broker would drop it.
    lease, messages = place.hold("g1")
    time.sleep(ttl + 1.0)
    later = Verdict(Action.RETRY, 1.0, "in a moment", "process")
    kinds = (_AGAIN, later, RELEASE)
    verdicts = {m.message_id: kinds[int(m.data) % 3] for m in messages if int(m.data) % 4}
    report = place.settle_all(lease, messages, verdicts)
    assert report.failed == report.lapsed == 0, report
    back: list[int] = place.rest()
    end = time.monotonic() + 20
    while len(back) < len(verdicts) and time.monotonic() < end:
        back += place.rest()

    assert sorted(back) == [number for number in range(count) if number % 4]
    assert place.count(parked) == 0
    return place.found(name, count)
