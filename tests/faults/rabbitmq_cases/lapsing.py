"""Leases that lapse, and generations that settle when they should no more."""

from __future__ import annotations

import time

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.testing.contract import settlement_of
from tests.faults.found import Found
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_cases.registry import case


@case()
def a_lease_lapses_before_it_is_settled(place: Place, name: str) -> Found:
    place.producer = place.producer_of(lease=4.0)
    place.fill(2_000)
    lease, messages = place.hold("g1")
    time.sleep(5.0)

    custodian = place.producer.custodian(place.env("g1"))
    assert not custodian.holds(lease)
    custodian.close()
    place.producer = place.producer_of(lease=30.0)
    assert place.rest() == list(range(2_000))
    # A late settlement is refused; its verdicts are not carried out.
    dead = Verdict(Action.DEAD_LETTER, 0.0, "too late", "batch")
    verdicts = dict.fromkeys((message.message_id for message in messages[:100]), dead)
    report = place.settle(lease, settlement_of(messages, verdicts))

    assert (report.lapsed, report.acked, report.dead_lettered) == (2_000, 0, 0), report
    assert place.dead_numbers() == set()
    return place.found(name, 2_000)


@case(slow=False)
def a_zombie_that_receives_is_fenced_off(place: Place, name: str) -> Found:
    place.fill(4_000)
    zombie = place.source("zombie")
    try:
        place.take(zombie, 1_000)
        # A sweep takes it for dead while it lives and goes on.
        place.settle(zombie.lease, Settlement(rest=RELEASE))
        with pytest.raises(BroadwayError):
            place.take(zombie)
    finally:
        zombie.close()

    assert place.rest() == list(range(4_000))
    return place.found(name, 4_000)


@case()
def a_zombie_of_an_older_generation_settles_late(place: Place, name: str) -> Found:
    place.fill(2_000)
    lease, messages = place.hold("zombie")
    # Its process task is cleared: released, and received again by a newer generation...
    place.settle(place.release_lease("zombie"), Settlement(rest=RELEASE))
    newer, again = place.hold("newer")
    assert sorted(int(message.data) for message in again) == list(range(2_000))

    # ...of which the zombie can settle nothing, whatever its verdicts.
    dead = Verdict(Action.DEAD_LETTER, 0.0, "too late", "batch")
    verdicts = dict.fromkeys((message.message_id for message in messages), dead)
    report = place.settle(lease, settlement_of(messages, verdicts))

    assert (report.acked, report.dead_lettered, report.requeued) == (0, 0, 0), report
    assert place.dead_numbers() == set()
    assert place.settle_all(newer, again).acked == 2_000
    assert place.rest() == []
    return place.found(name, 2_000)
