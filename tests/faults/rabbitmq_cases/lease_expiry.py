"""Leases that expire, and settlements of expired leases."""

from __future__ import annotations

import time

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.testing.contract import settlement_of
from tests.faults.case_result import CaseResult
from tests.faults.rabbitmq_cases.harness import QueueHarness
from tests.faults.rabbitmq_cases.registry import case


@case()
def a_lease_lapses_before_it_is_settled(harness: QueueHarness, name: str) -> CaseResult:
    harness.producer = harness.make_producer(lease=4.0)
    harness.fill(2_000)
    lease, messages = harness.receive_run("g1")
    time.sleep(5.0)

    custodian = harness.producer.custodian(harness.env("g1"))
    assert not custodian.holds(lease)
    custodian.close()
    harness.producer = harness.make_producer(lease=30.0)
    assert harness.drain() == list(range(2_000))
    # A late settlement is rejected; its verdicts are not applied.
    dead = Verdict(Action.DEAD_LETTER, 0.0, "too late", "batch")
    verdicts = dict.fromkeys((message.message_id for message in messages[:100]), dead)
    report = harness.settle(lease, settlement_of(messages, verdicts))

    assert (report.lapsed, report.acked, report.dead_lettered) == (2_000, 0, 0), report
    assert harness.dead_numbers() == set()
    return harness.result(name, 2_000)


@case(slow=False)
def a_zombie_that_receives_is_fenced_off(harness: QueueHarness, name: str) -> CaseResult:
    harness.fill(4_000)
    zombie = harness.source("zombie")
    try:
        harness.receive_all(zombie, 1_000)
        # A sweep releases its messages while it is still receiving.
        harness.settle(zombie.lease, Settlement(rest=RELEASE))
        with pytest.raises(BroadwayError):
            harness.receive_all(zombie)
    finally:
        zombie.close()

    assert harness.drain() == list(range(4_000))
    return harness.result(name, 4_000)


@case()
def a_zombie_of_an_older_generation_settles_late(harness: QueueHarness, name: str) -> CaseResult:
    harness.fill(2_000)
    lease, messages = harness.receive_run("zombie")
    # Its process task is cleared: a newer generation receives the released messages.
    harness.settle(harness.initial_lease("zombie"), Settlement(rest=RELEASE))
    newer, retried = harness.receive_run("newer")
    assert sorted(int(message.data) for message in retried) == list(range(2_000))

    # The zombie can then settle none of them.
    dead = Verdict(Action.DEAD_LETTER, 0.0, "too late", "batch")
    verdicts = dict.fromkeys((message.message_id for message in messages), dead)
    report = harness.settle(lease, settlement_of(messages, verdicts))

    assert (report.acked, report.dead_lettered, report.requeued) == (0, 0, 0), report
    assert harness.dead_numbers() == set()
    assert harness.settle_all(newer, retried).acked == 2_000
    assert harness.drain() == []
    return harness.result(name, 2_000)
