"""The custody contract: redelivery of all messages of any number of dead generations.

A broker does not detect crashes.  The run that handles messages marked as redelivered isolates the
message that kills its process, so a source must not delay any of them.
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
    """The promises for messages of dead generations."""

    @pytest.mark.parametrize("ending", ["no manifest", "damaged manifest", "no outcome"])
    def test_one_run_receives_all_messages_of_twelve_dead_generations_and_new_ones(
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

    def test_a_run_with_small_demands_receives_all_messages_of_dead_generations(
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
            while batch := source.secure(source.receive(7, timeout=0.2)):
                assert len(batch) <= 7
                taken += batch
            taken += source.stop()
            lease = self.copied(source.lease)

        assert sorted(message.data for message in taken) == [*held, *fresh]
        assert all(message.redelivered for message in taken if message.data in held)
        assert self.settle(harness, lease, settlement_of(taken)).acked == 80

    def test_a_group_keeps_its_order_after_dead_generations(self, harness: Harness) -> None:
        """Applies to brokers that keep the order of a group, or of all messages."""
        harness.groups = 4
        sent = bodies(40)
        harness.send(sent)
        held: list[Message] = []
        for number in range(3):
            lease, held = self._die(harness, f"dead {number}", "no manifest")
            self.settle(harness, lease, Settlement(rest=RELEASE))

        messages = self.rest_of_queue(harness, "alive")

        assert {message.data for message in held} <= {message.data for message in messages}
        for number in range(10):  # a broker may deliver a group in parts
            if len(messages) < len(sent):
                messages += self.rest_of_queue(harness, f"rest {number}")
        assert sorted(message.data for message in messages) == sent
        if self.keeps_order or harness.producer().keeps_order:
            places = [sent.index(message.data) for message in messages]
            for group in range(4):
                own = [place for place in places if place % 4 == group]
                assert own == sorted(own)

    def _die(self, harness: Harness, generation: str, ending: str) -> tuple[Lease, list[Message]]:
        """Receives all messages; returns the lease as recorded for the sweep, and the messages.

        Without a manifest only the initial lease of a generation is recorded.
        """
        with self.source(harness, generation) as source:
            opened = self.copied(source.lease)
            messages = [*self.take(source), *source.stop()]
            lease = self.copied(source.lease)
        return opened if ending == "no manifest" else lease, messages
