"""Deleted, full and expiring queues: the holding queue, and the source queue."""

from __future__ import annotations

import time
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq.broker.holding_queues import KEEPING
from tests.faults.case_result import CaseResult
from tests.faults.rabbitmq_cases.harness import QueueHarness
from tests.faults.rabbitmq_cases.registry import case

_RETRY = Verdict(Action.RETRY, 0.0, "retry", "process")


# -- the holding queue -----------------------------------------------------------------------------


@case(slow=False)
def the_holding_queue_is_deleted_in_transfer(harness: QueueHarness, name: str) -> CaseResult:
    harness.fill(4_000)
    source = harness.source("g1")
    try:
        first = harness.receive_all(source, 1_000)
        harness.delete(harness.holding_queue("g1"))
        with pytest.raises(LeaseLapsed, match="accepts no more messages"):
            harness.receive_all(source)
        lease = source.lease
    finally:
        source.close()

    # An operator deleted the queue before the manifest was published: its messages are lost and
    # reported.  All others are still in the source queue.
    report = harness.settle(lease, Settlement(rest=RELEASE))
    assert report.lapsed == lease.state["messages"], (report, lease.state)
    assert "emptied or deleted by hand" in report.errors[0]
    taken = {int(message.data) for message in first}
    kept = set(harness.drain())
    assert kept >= set(range(4_000)) - taken
    assert 4_000 - len(kept) <= report.lapsed

    result = harness.result(name, 4_000)
    deleted = result.lost[: report.lapsed]
    result.lost = result.lost[report.lapsed :]
    result.reported_lost = len(deleted)
    return result


@case()
def the_holding_queue_is_deleted_after_the_manifest(harness: QueueHarness, name: str) -> CaseResult:
    harness.fill(900)
    lease, messages = harness.receive_run("g1")
    harness.delete(harness.holding_queue("g1"))

    released = dict.fromkeys((message.message_id for message in messages[:100]), RELEASE)
    report = harness.settle_all(lease, messages, released)

    assert (report.acked, report.released, report.lapsed) == (800, 100, 0), report
    assert harness.drain() == list(range(100))
    return harness.result(name, 900)


@case()
def the_holding_queue_refuses(harness: QueueHarness, name: str) -> CaseResult:
    harness.fill(4_000)
    handed = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KEEPING, "x-max-length", 3)
        source = harness.source("g1")
        with pytest.raises(BroadwayError, match="accepts no more messages"):  # noqa: PT012
            while True:
                handed += len(harness.receive(source))
        lease = source.lease
        source.close()
        assert handed < 4_000
        harness.settle(lease, Settlement(rest=RELEASE))
    for queue in (harness.queues.held(0), harness.queues.dead):
        harness.delete(queue)  # was declared with the short limit

    assert harness.drain() == list(range(4_000))
    return harness.result(name, 4_000)


@case()
def the_holding_queue_is_deleted_after_a_death(harness: QueueHarness, name: str) -> CaseResult:
    """An operator deletes the empty queue; the next run declares it again."""
    harness.producer = harness.make_producer(lease=3.0)
    harness.fill(1_000)
    harness.receive_run("g1")
    time.sleep(3.0)
    harness.producer = harness.make_producer(lease=30.0)
    source = harness.source("sweeps")
    source.close()
    harness.delete(harness.queues.held(0))

    assert harness.drain() == list(range(1_000))
    return harness.result(name, 1_000)


# -- the source queue ------------------------------------------------------------------------------


@case()
def the_source_queue_is_deleted_in_transfer(harness: QueueHarness, name: str) -> CaseResult:
    harness.fill(3_000)
    source = harness.source("g1")
    messages: list[Message] = []
    try:
        messages += harness.receive_all(source, 1_000)
        harness.delete(harness.queue)
        with pytest.raises(ProducerError, match=harness.queue):  # noqa: PT012
            for _ in range(100):
                messages += harness.receive(source)
        lease = source.lease
    finally:
        source.close()

    # Secured messages are still in the holding queue; the operator deleted the others.
    report = harness.settle_all(lease, messages)
    assert report.acked == len(messages), report
    result = harness.result(name, 3_000)
    assert len(result.lost) == 3_000 - len(messages)
    result.reported_lost, result.lost = len(result.lost), []
    return result


@case()
def the_source_queue_is_full_when_messages_go_back(harness: QueueHarness, name: str) -> CaseResult:
    harness.fill(20, kind="quorum", **{"x-max-length": 20, "x-overflow": "reject-publish"})
    lease, messages = harness.receive_run("g1")
    _fill_up(harness)
    verdicts = dict.fromkeys((message.message_id for message in messages[:5]), _RETRY)

    report = harness.settle_all(lease, messages, verdicts)

    # Messages that the queue rejects stay in the holding queue: not settled, not lost.
    assert (report.acked, report.requeued + report.failed) == (15, 5), report
    assert report.failed > 0
    requeued = harness.drain()
    assert [number for number in requeued if number < 20] == sorted(
        int(message.data) for message in messages[:5]
    )
    return harness.result(name, 20)


def _fill_up(harness: QueueHarness) -> None:
    with harness.channel() as channel:
        for number in range(25):  # rejected messages do not count
            channel.basic_publish("", harness.queue, b"%d" % (1_000 + number))


@case()
def the_source_queue_has_a_ttl_and_a_dead_letter_cycle(
    harness: QueueHarness, name: str
) -> CaseResult:
    """Messages have passed a dead-letter cycle: a parking queue whose TTL returns them."""
    count, ttl = 600, 6.0
    parked = f"{harness.queue}-parked"
    with harness.channel() as channel:
        channel.queue_declare(
            parked,
            durable=True,
            arguments={
                "x-message-ttl": 300,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": harness.queue,
            },
        )
    cycle: dict[str, Any] = {
        "x-message-ttl": int(ttl * 1000),
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": parked,
    }
    harness.fill(count, **cycle)
    with harness.channel() as channel:
        for number, (method, _, _) in enumerate(channel.consume(harness.queue), 1):
            channel.basic_reject(method.delivery_tag, requeue=False)
            if number == count:
                break
    while harness.count(harness.queue) < count:
        time.sleep(0.1)

    # The lease outlasts the queue's TTL.  A requeued message gets a new TTL, and no x-death header
    # for which the broker would drop it.
    lease, messages = harness.receive_run("g1")
    time.sleep(ttl + 1.0)
    later = Verdict(Action.RETRY, 1.0, "retry later", "process")
    kinds = (_RETRY, later, RELEASE)
    verdicts = {m.message_id: kinds[int(m.data) % 3] for m in messages if int(m.data) % 4}
    report = harness.settle_all(lease, messages, verdicts)
    assert report.failed == report.lapsed == 0, report
    requeued: list[int] = harness.drain()
    end = time.monotonic() + 20
    while len(requeued) < len(verdicts) and time.monotonic() < end:
        requeued += harness.drain()

    assert sorted(requeued) == [number for number in range(count) if number % 4]
    assert harness.count(parked) == 0
    return harness.result(name, count)
