"""The limits of the guide, each reached at a real RabbitMQ."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any

import pytest

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import LEAVE, RELEASE, Action, Verdict
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import bundle
from airflow_broadway.producers.rabbitmq.broker import standing_queues
from airflow_broadway.testing.contract import ids, settlement_of
from tests.rabbitmq_place import Place, manage

pytestmark = pytest.mark.broker


def test_a_bundle_holds_500_messages_and_a_mebibyte_at_most(place):
    # Given small messages, and two that together just exceed a bundle's size
    half = bundle.MAX_BYTES // 2
    place.send(*[b"%d" % number for number in range(1_600)], b"x" * half, b"y" * half)

    with place.source(on_failure="retry") as source:
        taken: list[Message] = []
        while received := source.receive(2_000, timeout=0.3):
            taken += received
        taken += source.stop()
        lease = source.lease
    assert len(taken) == 1_602

    # Then the holding queue has them in bundles within both bounds
    sizes = []
    while stored := place.get(lease.state["holding_queue"]):
        _, held = bundle.unpack(stored[1])
        sizes.append((len(held), sum(len(bundle.body) for bundle in held)))
    assert (bundle.MAX_MESSAGES, bundle.MAX_BYTES) == (500, 1024 * 1024)
    assert sum(count for count, _ in sizes) == 1_602
    assert max(count for count, _ in sizes) <= 500
    assert max(size for _, size in sizes) < 1024 * 1024


def test_redelivered_messages_are_received_before_new_ones(place):
    # Given messages that a run released, and as many new ones
    place.send(*[b"old %d" % number for number in range(40)])
    _, lease = place.hold("g1", on_failure="retry")
    assert place.carry_out(lease, Settlement(rest=RELEASE)).released == 40
    place.send(*[b"new %d" % number for number in range(40)])

    # When the next run receives all, twenty at a time
    with place.source("g2", on_failure="retry") as source:
        portions = []
        while received := source.receive(20, timeout=0.5):
            portions.append([message.redelivered for message in received])

    marks = [mark for portion in portions for mark in portion]
    assert marks == [*[True] * 40, *[False] * 40]


class MovableClock(SystemClock):
    """A clock that can be advanced."""

    offset = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.offset)


def test_a_run_stops_receiving_at_two_percent_of_its_lease(place):
    place.send(b"1", b"2", b"3")
    clock = MovableClock()
    env = place.env("g1")
    object.__setattr__(env, "clock", clock)
    options: dict[str, Any] = {"lease": 10_000.0, "on_failure": "retry"}
    source = place.producer(**options).source(env)
    try:
        assert len(source.receive(1, timeout=5.0)) == 1
        clock.offset = 10_000.0 - 200.0 - 10.0
        assert len(source.receive(1, timeout=5.0)) == 1
        clock.offset = 10_000.0 - 200.0 + 10.0
        with pytest.raises(LeaseLapsed, match="is about to end while it still receives"):
            source.receive(1, timeout=5.0)
    finally:
        source.close()
    assert [message.data for message in place.settle("g2")[0]] == [b"3"]


def test_an_unsettled_message_is_redelivered_after_its_lease(place):
    place.send(b"1")
    began = time.monotonic()
    messages, lease = place.hold("g1", lease=4.0)
    settlement = settlement_of(messages, rest=LEAVE)
    assert place.carry_out(lease, settlement, lease=4.0) == SettleReport(left=1)

    redelivered = place.settle("g2")[0]
    while not redelivered:
        assert time.monotonic() - began < 20.0
        redelivered = place.settle("g2")[0]
    assert time.monotonic() - began >= 4.0 * 0.9
    assert (ids(redelivered), redelivered[0].redelivered) == (ids(messages), True)


class FakeTime:
    """Replaces the module ``time`` in waits for young queues: only sleep advances it."""

    def __init__(self) -> None:
        self.slept = 0.0
        self._now = time.time()

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self._now += seconds

    def pass_time(self, seconds: float) -> None:
        """Advances the time of a waiting run."""
        self._now += seconds

    def time(self) -> float:
        return self._now

    monotonic = time


@pytest.fixture
def fake_time(monkeypatch):
    result = FakeTime()
    monkeypatch.setattr(standing_queues, "time", result)
    return result


def test_only_the_first_run_waits_for_a_young_holding_queue(place, monkeypatch, fake_time):
    monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 2.0)

    def receive(generation: str) -> None:
        place.send(b"1")
        with place.source(generation, on_failure="retry") as source:
            assert len(source.receive(1, timeout=20.0)) == 1

    receive("g1")
    slept = fake_time.slept
    assert slept >= 2.0

    place.settle("none", on_failure="retry")
    queue = place.queues.held(0)
    with place.channel() as channel:
        channel.queue_purge(queue)
    receive("g2")
    assert fake_time.slept == slept


class TestStandingQueues:
    """Queues of released messages, which are unused until they are old enough."""

    def settle(self, place: Place, fake_time: FakeTime, generation: str) -> float:
        """Retries a message; returns the seconds slept to settle it."""
        place.send(b"1")
        messages, lease = place.hold(generation, on_failure="retry")
        failed = Verdict(Action.RETRY, 60.0, "why", "process")
        slept = fake_time.slept
        report = place.carry_out(lease, settlement_of(messages, rest=failed), on_failure="retry")
        assert report == SettleReport(requeued=1)
        return fake_time.slept - slept

    def find_delay_queue(self, place: Place) -> str:
        delays = place.server.queue_names("broadway.delay.")
        [name] = [delay for delay in delays if place.name in delay]
        return name

    @pytest.fixture(autouse=True)
    def ready(self, place, fake_time, monkeypatch):
        place.send(b"0")
        place.settle("first", on_failure="retry")  # declares all but queues of delays
        monkeypatch.setattr(standing_queues, "_RELIABLE_AGE", 2.0)

    def test_only_the_first_use_waits(self, place, fake_time):
        assert self.settle(place, fake_time, "g1") == 2.0
        assert self.settle(place, fake_time, "g2") == 0.0

    def test_a_queue_of_unknown_age_is_waited_for(self, place, fake_time, tmp_path):
        # Given a queue whose age is not recorded in this staging folder
        assert self.settle(place, fake_time, "g1") == 2.0
        for record in tmp_path.rglob("relied/*.json"):
            record.unlink()

        assert self.settle(place, fake_time, "g2") == 2.0

    def test_a_redeclared_queue_is_waited_for(self, place, fake_time):
        assert self.settle(place, fake_time, "g1") == 2.0
        manage(place.server, "DELETE", f"queues/%2F/{self.find_delay_queue(place)}")

        assert self.settle(place, fake_time, "g2") == 2.0
