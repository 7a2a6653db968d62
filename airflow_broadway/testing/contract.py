"""The custody contract, as a test suite that every producer passes.

The author of a producer inherits it and gives it a harness::

    class TestMyProducer(CustodyContract):
        @pytest.fixture
        def harness(self, tmp_path):
            return MyHarness(tmp_path)

pytest must be installed.  For readable failures, the suite's own ``conftest.py`` says
``pytest.register_assert_rewrite("airflow_broadway.testing.contract")``.
"""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from airflow_broadway.core.custody import (
    ACK,
    LEAVE,
    RELEASE,
    Action,
    Custodian,
    Lease,
    Settlement,
    SettleReport,
    Source,
    Verdict,
)
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.message import Message
from airflow_broadway.core.settler import entry_of
from airflow_broadway.testing.harness import Harness, bodies, ids, settlement_of
from airflow_broadway.testing.other_process import Child, plain, third_and_seventh

__all__ = ["CustodyContract", "Harness", "entry_of", "ids", "settlement_of"]


class CustodyContract(ABC):
    """What every producer promises; a subclass gives the ``harness`` fixture."""

    #: Whether messages arrive in the order in which they were sent.
    keeps_order: ClassVar[bool] = True
    #: Whether the broker itself says that a lease has lapsed.
    tells_lapse: ClassVar[bool] = True
    #: Whether a message given back keeps its attempt.
    keeps_attempt: ClassVar[bool] = True
    #: Bodies that the broker can carry, odd ones among them.
    odd_bodies: ClassVar[Sequence[bytes]] = (
        b"",
        b"\x00\xff not UTF-8",
        "zażółć".encode(),
        b"x" * 100_000,
    )

    @pytest.fixture
    @abstractmethod
    def harness(self) -> Any:
        """A harness on an empty queue of its own."""

    # -------------------------------------------------------------------------------- helpers

    @contextmanager
    def source(self, harness: Harness, generation: str) -> Iterator[Source]:
        """A source for ``generation``, closed in the end."""
        source = harness.producer().source(harness.env(generation))
        try:
            yield source
        finally:
            source.close()

    @contextmanager
    def custodian(self, harness: Harness) -> Iterator[Custodian]:
        """A custodian as another process would open it, closed in the end."""
        custodian = harness.producer().custodian(harness.env("custodian"))
        try:
            yield custodian
        finally:
            custodian.close()

    def take(self, source: Source, demand: int = 100_000) -> list[Message]:
        """Receive and secure until ``demand`` is met or the queue is quiet."""
        taken: list[Message] = []
        while len(taken) < demand:
            messages = source.receive(min(500, demand - len(taken)), timeout=0.2)
            if not messages:
                break
            taken += source.secure(messages)
        return taken

    def hold(
        self, harness: Harness, generation: str, demand: int = 100_000
    ) -> tuple[Lease, list[Message]]:
        """Take messages and close the source, as a process task does; the lease as read back."""
        with self.source(harness, generation) as source:
            messages = self.take(source, demand)
            return self.copied(source.lease), messages

    def settle(self, harness: Harness, lease: Lease, settlement: Settlement) -> SettleReport:
        """Settle from a custodian of its own."""
        with self.custodian(harness) as custodian:
            return custodian.settle(lease, settlement)

    def copied(self, lease: Lease) -> Lease:
        """The lease as another process reads it."""
        return Lease.from_json(json.loads(json.dumps(lease.to_json())))

    def rest_of_queue(self, harness: Harness, generation: str = "the rest") -> list[Message]:
        """What can be received now, acknowledged."""
        lease, messages = self.hold(harness, generation)
        self.settle(harness, lease, settlement_of(messages))
        return messages

    # ------------------------------------------------------------------------------- receiving

    def test_the_lease_is_valid_before_the_first_receive(self, harness: Harness) -> None:
        with self.source(harness, "g1") as source:
            lease = source.lease

            assert lease.kind == harness.producer().kind
            assert lease.generation == "g1"
            assert lease.seconds == harness.lease
            assert lease.owner["run_id"] == "run"
            assert lease.deadline > harness.clock.now()
            assert self.copied(lease) == lease

    def test_a_message_arrives_as_it_was_sent(self, harness: Harness) -> None:
        sent = list(self.odd_bodies)
        harness.send(sent)

        _, messages = self.hold(harness, "g1")

        assert sorted(message.data for message in messages) == sorted(sent)
        for message in messages:
            assert message.size == len(message.data)
            assert message.attempt == 1
            assert not message.redelivered
            assert message.received_at.tzinfo is not None
            json.dumps(dict(message.metadata))

    def test_receive_returns_at_most_its_demand_and_counts_positions(
        self, harness: Harness
    ) -> None:
        harness.send(bodies(25))

        with self.source(harness, "g1") as source:
            messages: list[Message] = []
            while portion := source.secure(source.receive(10, timeout=0.2)):
                assert len(portion) <= 10
                messages += portion

        assert [message.position for message in messages] == list(range(25))
        received = [message.data for message in messages]
        assert sorted(received) == bodies(25)
        if self.keeps_order:
            assert received == bodies(25)

    def test_an_empty_queue_gives_nothing_within_the_timeout(self, harness: Harness) -> None:
        with self.source(harness, "g1") as source:
            began = harness.clock.monotonic()

            assert list(source.receive(10, timeout=0.5)) == []

            assert 0.5 <= harness.clock.monotonic() - began < 5.0

    def test_a_message_is_held_by_one_generation_only(self, harness: Harness) -> None:
        harness.send(bodies(40))

        with self.source(harness, "g1") as one, self.source(harness, "g2") as two:
            first = self.take(one, 15)
            second = self.take(two)
            assert len(first) == 15
            assert sorted(m.data for m in [*first, *second]) == bodies(40)
            assert self.take(one) == []

        assert len({*ids(first), *ids(second)}) == 40

    def test_an_empty_run_settles_to_nothing(self, harness: Harness) -> None:
        lease, messages = self.hold(harness, "g1")

        assert messages == []
        assert self.settle(harness, lease, settlement_of([])) == SettleReport()

    def test_closing_twice_is_safe(self, harness: Harness) -> None:
        source = harness.producer().source(harness.env("g1"))
        custodian = harness.producer().custodian(harness.env("g1"))
        for half in (source, custodian, source, custodian):
            half.close()

    # -------------------------------------------------------------------------------- settling

    def test_a_secured_message_outlives_its_source(self, harness: Harness) -> None:
        harness.send(bodies(3))

        lease, messages = self.hold(harness, "g1")

        # The source is closed; nobody else gets the messages, and another process settles them.
        assert self.rest_of_queue(harness) == []
        with self.custodian(harness) as custodian:
            assert custodian.holds(lease)
            assert custodian.settle(lease, settlement_of(messages)) == SettleReport(acked=3)
            assert not custodian.holds(lease)

    def test_acknowledged_messages_never_come_back(self, harness: Harness) -> None:
        harness.send(bodies(30))
        lease, messages = self.hold(harness, "g1")

        self.settle(harness, lease, settlement_of(messages))

        assert self.rest_of_queue(harness, "g2") == []
        harness.pass_time(2 * harness.lease)
        assert self.rest_of_queue(harness, "g3") == []

    def test_a_retried_message_waits_for_its_delay_and_uses_an_attempt(
        self, harness: Harness
    ) -> None:
        harness.send(bodies(1))
        for attempt in (1, 2, 3):
            lease, [message] = self.hold(harness, f"g{attempt}")
            assert message.attempt == attempt
            assert message.redelivered == (attempt > 1)
            retry = Verdict(Action.RETRY, 5.0, "later", "process")
            settlement = settlement_of([message], {message.message_id: retry})

            assert self.settle(harness, lease, settlement) == SettleReport(requeued=1)

            assert self.rest_of_queue(harness, f"too early {attempt}") == []
            harness.pass_time(5.1)
        [last] = self.rest_of_queue(harness)
        assert last.data == bodies(1)[0]
        assert last.message_id == message.message_id

    def test_a_dead_letter_is_not_delivered_again(self, harness: Harness) -> None:
        harness.send(bodies(4))
        lease, messages = self.hold(harness, "g1")
        dead = Verdict(Action.DEAD_LETTER, 0.0, "no departure delay", "process")
        settlement = settlement_of(messages, dict.fromkeys(ids(messages[:3]), dead))

        report = self.settle(harness, lease, settlement)

        assert report == SettleReport(acked=1, dead_lettered=3)
        depth = harness.producer().depth(harness.env("g1"))
        assert depth is None or depth.dead == 3
        harness.pass_time(2 * harness.lease)
        assert self.rest_of_queue(harness) == []

    def test_a_message_left_to_the_broker_is_counted_left(self, harness: Harness) -> None:
        harness.send(bodies(2))
        lease, messages = self.hold(harness, "g1")

        report = self.settle(harness, lease, settlement_of(messages, rest=LEAVE))

        assert report == SettleReport(left=2)

    def test_a_released_message_comes_back_at_once_on_the_same_attempt(
        self, harness: Harness
    ) -> None:
        harness.send(bodies(5))
        lease, messages = self.hold(harness, "g1")

        report = self.settle(harness, lease, settlement_of(messages, rest=RELEASE))

        assert report == SettleReport(released=5)
        again = self.rest_of_queue(harness)
        assert sorted(ids(again)) == sorted(ids(messages))
        assert all(message.redelivered for message in again)
        if self.keeps_attempt:
            assert all(message.attempt == 1 for message in again)

    def test_a_generation_without_a_manifest_is_released(self, harness: Harness) -> None:
        harness.send(bodies(5))
        lease, messages = self.hold(harness, "g1")

        report = self.settle(harness, lease, Settlement(rest=RELEASE))

        assert (report.released, report.failed) == (5, 0)
        assert sorted(ids(self.rest_of_queue(harness))) == sorted(ids(messages))

    def test_every_message_is_in_exactly_one_count(self, harness: Harness) -> None:
        harness.send(bodies(60))
        lease, messages = self.hold(harness, "g1")
        choice = [
            Verdict(Action.RETRY, 1.0, "once more", "batch"),
            Verdict(Action.DEAD_LETTER, 0.0, "bad", "process"),
            LEAVE,
            RELEASE,
        ]
        verdicts = {
            message.message_id: choice[place % 5]
            for place, message in enumerate(messages)
            if place % 5 < 4
        }

        report = self.settle(harness, lease, settlement_of(messages, verdicts))

        assert report == SettleReport(acked=12, requeued=12, dead_lettered=12, left=12, released=12)
        assert report.total == len(messages)

    def test_settling_again_changes_nothing_and_reports_the_same(self, harness: Harness) -> None:
        harness.send(bodies(6))
        lease, messages = self.hold(harness, "g1")
        verdicts = {messages[0].message_id: RELEASE}
        first = self.settle(harness, lease, settlement_of(messages, verdicts))
        taken, [again] = self.hold(harness, "g2")

        second = self.settle(harness, lease, settlement_of(messages, verdicts))

        assert second == first == SettleReport(acked=5, released=1)
        # The message that was released is another's now, and stays so.
        assert self.settle(harness, taken, settlement_of([again])) == SettleReport(acked=1)
        assert self.rest_of_queue(harness) == []

    # ------------------------------------------------------------------------- settling at once

    def test_settling_now_keeps_the_lease_for_the_others(self, harness: Harness) -> None:
        harness.send(bodies(10))
        lease, messages = self.hold(harness, "g1")
        with self.custodian(harness) as custodian:
            early = [entry_of(message, ACK) for message in messages[:4]]

            now = custodian.settle_now(lease, early)

            assert now == SettleReport(acked=4)
            assert custodian.holds(lease)
            later = custodian.settle(lease, settlement_of(messages[4:]))
            assert later == SettleReport(acked=6)
            assert (now + later).total == 10
        harness.pass_time(2 * harness.lease)
        assert self.rest_of_queue(harness) == []

    def test_a_run_does_not_receive_what_it_gave_back(self, harness: Harness) -> None:
        harness.send(bodies(3))
        with self.source(harness, "g1") as source, self.custodian(harness) as custodian:
            messages = self.take(source)
            given = [
                entry_of(messages[0], Verdict(Action.RETRY, 0.0, "again", "process")),
                entry_of(messages[1], RELEASE),
            ]

            report = custodian.settle_now(source.lease, given)

            assert report == SettleReport(requeued=1, released=1)
            assert self.take(source) == []
        assert sorted(ids(self.rest_of_queue(harness))) == sorted(ids(messages[:2]))

    # -------------------------------------------------------------------------- the lease's end

    def test_a_renewed_lease_outlives_its_first_deadline(self, harness: Harness) -> None:
        if not harness.producer().renews:
            pytest.skip("leases of this producer have a fixed bound")
        harness.send(bodies(4))
        lease, messages = self.hold(harness, "g1")
        with self.custodian(harness) as custodian:
            for _ in range(4):
                harness.pass_time(harness.lease * 0.6)
                renewed = custodian.renew(lease)
                assert renewed is not None
                assert renewed.deadline > lease.deadline
                lease = self.copied(renewed)
                assert self.rest_of_queue(harness, f"other {lease.deadline}") == []
            assert custodian.holds(lease)
            assert custodian.settle(lease, settlement_of(messages)).acked == 4

    def test_a_lapsed_lease_returns_its_messages_marked(self, harness: Harness) -> None:
        harness.send(bodies(5))
        lease, messages = self.hold(harness, "g1")
        harness.pass_time(harness.lease * 1.1)

        with self.custodian(harness) as custodian:
            assert not custodian.holds(lease)
        again = self.rest_of_queue(harness)

        assert sorted(ids(again)) == sorted(ids(messages))
        assert sorted(message.data for message in again) == bodies(5)
        assert all(message.redelivered for message in again)
        if self.keeps_attempt:
            assert all(message.attempt == 1 for message in again)

    def test_a_zombie_settles_nothing_of_what_another_holds(self, harness: Harness) -> None:
        if not self.tells_lapse:
            pytest.skip("this broker gives no signal of a lapse")
        harness.send(bodies(6))
        old, messages = self.hold(harness, "zombie")
        harness.pass_time(harness.lease * 1.1)
        new, again = self.hold(harness, "heir")
        assert len(again) == 6

        with self.custodian(harness) as custodian:
            dead = Verdict(Action.DEAD_LETTER, 0.0, "zombie", "process")
            early = [entry_of(message, dead) for message in messages[:2]]
            verdicts = {messages[2].message_id: dead}
            assert custodian.settle_now(old, early) == SettleReport(lapsed=2)
            report = custodian.settle(old, settlement_of(messages, verdicts))
            assert report == SettleReport(lapsed=6)
            assert custodian.settle(old, settlement_of(messages, verdicts)) == report
            if harness.producer().renews:
                assert custodian.renew(old) is None
            assert not custodian.holds(old)

            assert custodian.holds(new)
            assert custodian.settle(new, settlement_of(again)) == SettleReport(acked=6)

    def test_a_generation_whose_lease_has_ended_receives_no_more(self, harness: Harness) -> None:
        harness.send(bodies(4))
        with self.source(harness, "g1") as source:
            self.take(source, 2)
            self.settle(harness, source.lease, Settlement(rest=RELEASE))
            try:
                received = self.take(source)
            except BroadwayError:
                received = []
            assert received == []
        assert len(self.rest_of_queue(harness)) == 4

    # --------------------------------------------------------------------------------- kill -9

    def test_killed_between_receive_and_settle_nothing_is_lost(self, harness: Harness) -> None:
        harness.send(bodies(500))
        with Child(harness, "hold", "killed", "300") as child:
            held = child.line()
            assert len(held["ids"]) == 300
            child.kill()

        before = ids(self.rest_of_queue(harness, "before the lapse"))
        harness.pass_time(harness.lease * 1.1)
        after = self.rest_of_queue(harness, "after the lapse")

        assert len(before) == 200
        assert sorted(ids(after)) == sorted(held["ids"])
        assert all(message.redelivered for message in after)

    @pytest.mark.parametrize("seed", range(5))
    def test_killed_while_settling_nothing_is_lost(self, harness: Harness, seed: int) -> None:
        count = 3_000
        harness.send(bodies(count))
        lease, messages = self.hold(harness, "settled")
        # Every third is retried, every seventh of the others a dead letter.
        verdicts = {m.message_id: third_and_seventh(place) for place, m in enumerate(messages)}
        verdicts = {key: verdict for key, verdict in verdicts.items() if verdict is not ACK}
        settlement = settlement_of(messages, verdicts)
        with Child(harness, "settle") as child:
            child.say({"lease": lease.to_json(), "entries": plain(messages)})
            child.line()
            time.sleep(random.Random(seed).uniform(0.0, 0.1))
            child.kill()

        report = self.settle(harness, lease, settlement)

        retried = [m for place, m in enumerate(messages) if place % 3 == 0]
        dead = sum(1 for place in range(count) if place % 3 and place % 7 == 0)
        assert report.total == count
        assert (report.requeued, report.dead_lettered) == (len(retried), dead)
        assert report.acked == count - len(retried) - dead
        harness.pass_time(1.1)
        again = self.rest_of_queue(harness)
        assert sorted(ids(again)) == sorted(ids(retried))
        assert all(message.attempt == 2 for message in again)

    def test_two_processes_at_once_never_get_the_same_message(self, harness: Harness) -> None:
        harness.send(bodies(2_000))

        with Child(harness, "drain", "one") as one, Child(harness, "drain", "two") as two:
            found = [one.line()["ids"], two.line()["ids"]]

        everything = [*found[0], *found[1]]
        assert len(everything) == len(set(everything)) == 2_000
