"""The custody contract: all that a dead generation held is redelivered, marked, however many died.

A broker knows nothing of crashes.  Which message ends its process is found by the run that handles
what is marked as redelivered; a source that put anything off would only delay that.
"""

from __future__ import annotations

import pytest

from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.model.message import Message
from airflow_broadway.testing.contract.base import ContractBase
from airflow_broadway.testing.harness import Harness, bodies, settlement_of

#: Generations that die one after another.
_DEATHS = 12


class Redelivery(ContractBase):
    """What is promised of messages whose generation died."""

    @pytest.mark.parametrize("ending", ["no manifest", "damaged manifest", "no outcome"])
    def test_one_run_takes_all_that_twelve_generations_died_with_and_what_is_new(
        self, harness: Harness, ending: str
    ) -> None:
        held = bodies(60)
        harness.send(held)
        for number in range(_DEATHS):
            lease, messages = self._die(harness, f"dead {number}", ending)
            assert sorted(message.data for message in messages) == held
            assert {message.redelivered for message in messages} == {number > 0}
            if self.keeps_attempt:
                assert {message.attempt for message in messages} == {1}
            settlement = Settlement(rest=RELEASE, damaged=ending == "damaged manifest")
            if ending == "no outcome":
                settlement = settlement_of(messages, rest=RELEASE)
            report = self.settle(harness, lease, settlement)
            assert (report.released, report.dead_lettered, report.lapsed) == (60, 0, 0)
        fresh = bodies(60, start=500)
        harness.send(fresh)

        lease, messages = self.hold(harness, "alive")

        assert sorted(message.data for message in messages) == [*held, *fresh]
        if self.keeps_order:
            assert [message.data for message in messages] == [*held, *fresh]
        assert [m.data for m in messages if not m.redelivered] == [
            message.data for message in messages if message.data in fresh
        ]
        assert self.settle(harness, lease, settlement_of(messages)).acked == 120
        depth = harness.producer().depth(harness.env("the end"))
        assert depth is None or depth.dead == 0

    def test_a_run_that_asks_for_few_at_a_time_takes_all_that_dead_generations_held(
        self, harness: Harness
    ) -> None:
        held, fresh = bodies(60), bodies(20, start=500)
        harness.send(held)
        for number in range(3):
            lease, messages = self._die(harness, f"dead {number}", "no manifest")
            assert len(messages) == 60
            self.settle(harness, lease, Settlement(rest=RELEASE))
        harness.send(fresh)

        with self.source(harness, "alive") as source:
            taken: list[Message] = []
            while found := source.secure(source.receive(7, timeout=0.2)):
                assert len(found) <= 7
                taken += found
            taken += source.stop()
            lease = self.copied(source.lease)

        assert sorted(message.data for message in taken) == [*held, *fresh]
        assert all(message.redelivered for message in taken if message.data in held)
        assert self.settle(harness, lease, settlement_of(taken)).acked == 80

    def test_a_group_keeps_its_order_whatever_died(self, harness: Harness) -> None:
        """Where the broker keeps the order of a group, or of all."""
        harness.groups = 4
        sent = bodies(40)
        harness.send(sent)
        held: list[Message] = []
        for number in range(3):
            lease, held = self._die(harness, f"dead {number}", "no manifest")
            self.settle(harness, lease, Settlement(rest=RELEASE))

        messages = self.rest_of_queue(harness, "alive")

        assert {message.data for message in held} <= {message.data for message in messages}
        for number in range(10):  # a broker may hand out a group in parts
            if len(messages) < len(sent):
                messages += self.rest_of_queue(harness, f"rest {number}")
        assert sorted(message.data for message in messages) == sent
        if self.keeps_order or harness.producer().keeps_order:
            places = [sent.index(message.data) for message in messages]
            for group in range(4):
                own = [place for place in places if place % 4 == group]
                assert own == sorted(own)

    def _die(self, harness: Harness, generation: str, ending: str) -> tuple[Lease, list[Message]]:
        """Take everything; the lease as its sweep knows it, and the messages.

        Of a generation that published no manifest only the lease is recorded that it began with.
        """
        with self.source(harness, generation) as source:
            opened = self.copied(source.lease)
            messages = [*self.take(source), *source.stop()]
            lease = self.copied(source.lease)
        return opened if ending == "no manifest" else lease, messages
