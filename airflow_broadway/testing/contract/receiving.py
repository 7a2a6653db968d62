"""The custody contract: receiving messages."""

from __future__ import annotations

import json

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.model.message import Message
from airflow_broadway.testing.contract.base import ContractBase
from airflow_broadway.testing.harness import Harness, bodies, ids, settlement_of


class Receiving(ContractBase):
    """The promises of a source."""

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
            while batch := source.secure(source.receive(10, timeout=0.2)):
                assert len(batch) <= 10
                messages += batch

        assert [message.position for message in messages] == list(range(25))
        received = [message.data for message in messages]
        assert sorted(received) == bodies(25)
        if self.keeps_order:
            assert received == bodies(25)

    def test_receive_from_an_empty_queue_ends_at_the_timeout(self, harness: Harness) -> None:
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
            assert self.shares or second == []
            first += self.take(one)
            assert len(first) == 15 if self.shares else 40
            assert sorted(m.data for m in [*first, *second]) == bodies(40)

        assert len({*ids(first), *ids(second)}) == 40

    def test_a_stopped_source_receives_no_later_messages(self, harness: Harness) -> None:
        harness.send(bodies(30))
        with self.source(harness, "g1") as source:
            # The demand is not met, and still no message that arrives from now on is received.
            held = [*source.secure(source.receive(100, timeout=1.0)), *source.stop()]
            lease = self.copied(source.lease)
            harness.send(bodies(20, start=30))
            harness.pass_time(0.3)

            assert list(source.receive(100, timeout=0.5)) == []
            assert list(source.stop()) == []
            assert self.copied(source.lease).state == lease.state

        assert self.settle(harness, lease, settlement_of(held)) == SettleReport(acked=len(held))
        rest = self.rest_of_queue(harness)
        assert sorted(m.data for m in [*held, *rest]) == bodies(50)

    def test_the_report_of_an_empty_run_is_empty(self, harness: Harness) -> None:
        lease, messages = self.hold(harness, "g1")

        assert messages == []
        assert self.settle(harness, lease, settlement_of([])) == SettleReport()

    def test_closing_twice_is_safe(self, harness: Harness) -> None:
        source = harness.producer().source(harness.env("g1"))
        custodian = harness.producer().custodian(harness.env("g1"))
        for half in (source, custodian, source, custodian):
            half.close()
