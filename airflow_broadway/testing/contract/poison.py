"""The custody contract: what processes die of is found, and takes no neighbour along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from airflow_broadway.core.custody.protocol import SUSPECTS, Lease, Settlement
from airflow_broadway.core.custody.verdicts import ACK, RELEASE
from airflow_broadway.core.model.message import Message
from airflow_broadway.testing.contract.base import ContractBase
from airflow_broadway.testing.harness import Harness, bodies, ids, settlement_of

__all__ = ["Poison"]


class Poison(ContractBase):
    """What a producer does about messages that kill the process that handles them.

    Not every producer does it; those that do pass this, with harnesses that heed ``max_crashes``.
    """

    #: Whether a run takes a whole portion of suspects, in several receives if need be.
    whole_portions: ClassVar[bool] = True

    def _runs(self, harness: Harness) -> Iterator[tuple[Lease, Sequence[Message]]]:
        """What each run holds, until nothing comes any more."""
        quiet = 0
        for number in range(60):
            lease, messages = self.hold(harness, f"g{number}")
            quiet = 0 if messages else quiet + 1
            if quiet == 2:  # the first may have set something aside, and no more
                return
            yield lease, messages

    def test_a_message_that_kills_its_process_is_set_aside_and_its_neighbours_are_handled(
        self, harness: Harness
    ) -> None:
        harness.max_crashes = 2
        sent = bodies(25)
        harness.send(sent)
        handled: list[bytes] = []
        deaths = 0
        for lease, messages in self._runs(harness):
            if sent[7] in [message.data for message in messages]:
                self.settle(harness, lease, Settlement(rest=RELEASE))
                deaths += 1
            else:
                self.settle(harness, lease, settlement_of(messages))
                handled += [message.data for message in messages]

        assert sorted(handled) == [each for each in sent if each != sent[7]]
        assert deaths == 4  # twice among the others, once among ten, once alone
        depth = harness.producer().depth(harness.env("the end"))
        assert depth is None or (depth.ready, depth.dead) == (0, 1)

    def test_a_message_that_kills_in_a_batch_is_told_from_its_neighbours_over_runs(
        self, harness: Harness
    ) -> None:
        """Each run publishes what it received, and the batch of five with the message dies."""
        harness.max_crashes = 2
        sent = bodies(25)
        harness.send(sent)
        handled: list[bytes] = []
        died: list[int] = []
        for lease, messages in self._runs(harness):
            places = [place for place, each in enumerate(messages) if each.data == sent[7]]
            batch = [each for place in places for each in messages[place // 5 * 5 :][:5]]
            others = [each for each in messages if each not in batch]
            settlement = settlement_of(messages, dict.fromkeys(ids(others), ACK), rest=RELEASE)
            settlement = replace(settlement, died=frozenset(ids(batch)))
            report = self.settle(harness, lease, settlement)
            assert (report.acked, report.released) == (len(others), len(batch))
            handled += [each.data for each in others]
            died += [len(batch)] if batch else []

        assert sorted(handled) == [each for each in sent if each != sent[7]]
        assert died == [5, 5, 5, 1]  # with its neighbours until a portion is of one
        depth = harness.producer().depth(harness.env("the end"))
        assert depth is None or (depth.ready, depth.dead) == (0, 1)

    def test_what_kills_is_found_among_many_others_that_came_before_it(
        self, harness: Harness
    ) -> None:
        """However little a run asks for at a time."""
        harness.max_crashes = 2
        killers = bodies(20, start=500)
        harness.send(killers)
        for number in range(2):
            lease, messages = self.hold(harness, f"g{number}")
            assert len(messages) == len(killers)
            if number == 1:
                harness.send(bodies(300))
            self.settle(harness, lease, Settlement(rest=RELEASE))

        with self.source(harness, "g2") as source:
            taken: list[bytes] = []
            while found := source.secure(source.receive(3, timeout=0.2)):
                assert len(found) <= 3
                taken += [message.data for message in found]
            source.stop()
            lease = self.copied(source.lease)
        assert len(taken) == 10 or (taken and not self.whole_portions)  # and nothing beside it
        assert set(taken) < set(killers)
        assert lease.state[SUSPECTS]
        self.settle(harness, lease, Settlement(rest=RELEASE))

    def test_a_batch_without_an_outcome_of_which_no_process_died_counts_no_death(
        self, harness: Harness
    ) -> None:
        harness.max_crashes = 2
        harness.send(bodies(25))
        for number in range(4):
            lease, messages = self.hold(harness, f"g{number}")
            assert len(messages) == 25
            self.settle(harness, lease, settlement_of(messages, rest=RELEASE))

    def test_a_generation_whose_manifest_is_damaged_counts_no_death(self, harness: Harness) -> None:
        """It is given back whole: its process came to its end, and said so."""
        harness.max_crashes = 2
        harness.send(bodies(25))
        for number in range(4):
            lease, messages = self.hold(harness, f"g{number}")
            assert len(messages) == 25
            report = self.settle(harness, lease, Settlement(rest=RELEASE, damaged=True))
            assert (report.released, report.lapsed) == (25, 0)

    def test_a_run_that_was_given_up_in_order_counts_no_death(self, harness: Harness) -> None:
        """Three of them, and all is taken together all the same."""
        harness.max_crashes = 2
        harness.send(bodies(25))
        for number in range(3):
            with self.source(harness, f"g{number}") as source:
                messages = self.take(source)
                source.stop()
                self.settle(harness, source.lease, Settlement(rest=RELEASE))
            assert len(messages) == 25
