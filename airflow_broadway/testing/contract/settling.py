"""The custody contract: carrying out verdicts, at the end of a run and immediately."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, LEAVE, RELEASE, Action, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.testing.contract.base import ContractBase
from airflow_broadway.testing.harness import Harness, bodies, ids, settlement_of

_RETRY = Verdict(Action.RETRY, 1.0, "once more", "batch")
_DEAD = Verdict(Action.DEAD_LETTER, 0.0, "bad", "process")


class Settling(ContractBase):
    """The promises of a custodian."""

    def test_a_secured_message_outlives_its_source(self, harness: Harness) -> None:
        lease, messages = self.send_and_hold(harness, 3)

        # With the source closed, no other run receives the messages, and another process settles.
        assert self.rest_of_queue(harness) == []
        with self.custodian(harness) as custodian:
            assert custodian.holds(lease)
            assert custodian.settle(lease, settlement_of(messages)) == SettleReport(acked=3)
            assert not custodian.holds(lease)

    def test_acknowledged_messages_are_never_redelivered(self, harness: Harness) -> None:
        lease, messages = self.send_and_hold(harness, 30)

        self.settle(harness, lease, settlement_of(messages))

        assert self.rest_of_queue(harness, "g2") == []
        harness.pass_time(1.1 * harness.lease)
        assert self.rest_of_queue(harness, "g3") == []

    def test_a_retried_message_is_redelivered_after_its_delay_on_the_next_attempt(
        self, harness: Harness
    ) -> None:
        harness.send(bodies(1))
        for attempt in (1, 2):
            lease, [message] = self.hold(harness, f"g{attempt}")
            assert message.attempt == attempt
            assert message.redelivered == (attempt > 1)
            retry = Verdict(Action.RETRY, 5.0, "later", "process")
            settlement = settlement_of([message], {message.message_id: retry})

            assert self.settle(harness, lease, settlement) == SettleReport(requeued=1)

            assert self.rest_of_queue(harness, f"too early {attempt}") == []
            harness.pass_time(5.1)
        [last] = self.rest_of_queue(harness)
        assert (last.attempt, last.redelivered) == (3, True)
        assert last.data == bodies(1)[0]
        assert last.message_id == message.message_id

    def test_a_dead_lettered_message_is_not_redelivered(self, harness: Harness) -> None:
        lease, messages = self.send_and_hold(harness, 4)
        settlement = settlement_of(messages, dict.fromkeys(ids(messages[:3]), _DEAD))

        report = self.settle(harness, lease, settlement)

        assert report == SettleReport(acked=1, dead_lettered=3)
        depth = harness.producer().depth(harness.env("g1"))
        assert depth is None or depth.dead == 3
        harness.pass_time(1.1 * harness.lease)
        assert self.rest_of_queue(harness) == []

    def test_a_message_left_to_the_broker_is_counted_left(self, harness: Harness) -> None:
        lease, messages = self.send_and_hold(harness, 2)

        report = self.settle(harness, lease, settlement_of(messages, rest=LEAVE))

        assert report == SettleReport(left=2)

    def test_a_released_message_is_redelivered_immediately_on_the_same_attempt(
        self, harness: Harness
    ) -> None:
        lease, messages = self.send_and_hold(harness, 5)

        report = self.settle(harness, lease, settlement_of(messages, rest=RELEASE))

        assert report == SettleReport(released=5)
        again = self.rest_of_queue(harness)
        assert sorted(ids(again)) == sorted(ids(messages))
        assert all(message.redelivered for message in again)
        if self.keeps_attempt:
            assert all(message.attempt == 1 for message in again)

    def test_a_generation_without_a_manifest_is_released(self, harness: Harness) -> None:
        lease, messages = self.send_and_hold(harness, 5)

        report = self.settle(harness, lease, Settlement(rest=RELEASE))

        assert (report.released, report.failed) == (5, 0)
        assert sorted(ids(self.rest_of_queue(harness))) == sorted(ids(messages))

    def test_every_message_is_in_exactly_one_count(self, harness: Harness) -> None:
        self.need_independent()
        lease, messages = self.send_and_hold(harness, 60)
        choice = [_RETRY, _DEAD, LEAVE, RELEASE]
        verdicts = {
            message.message_id: choice[place % 5]
            for place, message in enumerate(messages)
            if place % 5 < 4
        }

        report = self.settle(harness, lease, settlement_of(messages, verdicts))

        assert report == SettleReport(acked=12, requeued=12, dead_lettered=12, left=12, released=12)
        assert report.total == len(messages)

    def test_settling_again_changes_nothing_and_reports_the_same(self, harness: Harness) -> None:
        self.need_independent()
        lease, messages = self.send_and_hold(harness, 6)
        verdicts = {messages[0].message_id: RELEASE}
        first = self.settle(harness, lease, settlement_of(messages, verdicts))
        taken, [again] = self.hold(harness, "g2")

        second = self.settle(harness, lease, settlement_of(messages, verdicts))

        assert second == first == SettleReport(acked=5, released=1)
        # The released message still belongs to the other generation.
        assert self.settle(harness, taken, settlement_of([again])) == SettleReport(acked=1)
        assert self.rest_of_queue(harness) == []

    # ------------------------------------------------------------------------- redelivery

    def test_the_report_lists_exactly_the_redelivered_messages(self, harness: Harness) -> None:
        """Includes messages released behind one of their group, or released immediately."""
        harness.groups = 4
        lease, messages = self.send_and_hold(harness, 40)
        some = [_DEAD, RELEASE, _RETRY, _DEAD, _DEAD]
        verdicts = dict(zip(ids(messages[6:11]), some, strict=True))
        with self.custodian(harness) as custodian:
            at_once = [messages[0].message_id, messages[-1].message_id]
            entries = [entry_of(messages[0], _DEAD), entry_of(messages[-1], RELEASE)]
            early = custodian.settle_now(lease, entries)
        others = [
            m for m in messages if m.message_id not in at_once or m.message_id in early.undone
        ]
        settlement = replace(settlement_of(others, verdicts), settled_now=early)

        report = self.settle(harness, lease, settlement)

        assert report.again is not None
        named = {key for key in ids(messages) if report.again.has(key)}
        # A repeated settlement with late outcomes returns the same report.
        again = self.settle(harness, lease, settlement_of(others)).again
        assert again is not None
        assert {key for key in ids(messages) if again.has(key)} == named
        harness.pass_time(1.1)
        assert self.all_of_queue(harness) & {*ids(messages)} == named
        assert messages[-1].message_id in named
        assert messages[0].message_id not in named

    def test_lapsed_messages_are_redelivered_and_reported(self, harness: Harness) -> None:
        lease, messages = self.send_and_hold(harness, 10)
        with self.custodian(harness) as custodian:
            custodian.settle_now(lease, [entry_of(messages[0], ACK)])
        harness.pass_time(1.1 * harness.lease)
        known = SettleReport(acked=1)
        settlement = replace(settlement_of(messages[1:]), settled_now=known)

        report = self.settle(harness, lease, settlement)

        assert report.again is not None
        named = {key for key in ids(messages) if report.again.has(key)}
        assert self.all_of_queue(harness) == named

    def all_of_queue(self, harness: Harness) -> set[str]:
        """Receives all ready messages in several runs; returns their ids."""
        received: set[str] = set()
        for number in range(100):
            messages = self.rest_of_queue(harness, f"all {number}")
            if not messages:
                break
            received.update(ids(messages))
        return received

    # ------------------------------------------------------------------------- immediately

    def test_settling_now_keeps_the_lease_for_the_others(self, harness: Harness) -> None:
        lease, messages = self.send_and_hold(harness, 10)
        with self.custodian(harness) as custodian:
            early = [entry_of(message, ACK) for message in messages[:4]]

            now = custodian.settle_now(lease, early)

            assert now == SettleReport(acked=4)
            assert custodian.holds(lease)
            later = custodian.settle(lease, settlement_of(messages[4:]))
            assert later == SettleReport(acked=6)
            assert (now + later).total == 10
        harness.pass_time(1.1 * harness.lease)
        assert self.rest_of_queue(harness) == []

    @pytest.mark.parametrize("known", [0, 2])
    def test_unrecorded_immediate_settlements_are_in_the_report(
        self, harness: Harness, known: int
    ) -> None:
        lease, messages = self.send_and_hold(harness, 10)
        with self.custodian(harness) as custodian:
            custodian.settle_now(lease, [entry_of(message, ACK) for message in messages[:2]])
            # The caller died before it recorded these
            custodian.settle_now(lease, [entry_of(message, ACK) for message in messages[2:5]])
            custodian.settle_now(lease, [entry_of(message, _DEAD) for message in messages[5:6]])
            settlement = replace(
                settlement_of(messages[known:]), settled_now=SettleReport(acked=known)
            )

            report = custodian.settle(lease, settlement)

            assert report == SettleReport(acked=9 - known, dead_lettered=1)
            assert custodian.settle(lease, settlement) == report
        assert self.rest_of_queue(harness) == []

    def test_immediate_settlements_without_a_manifest_are_in_the_report(
        self, harness: Harness
    ) -> None:
        lease, messages = self.send_and_hold(harness, 4)
        with self.custodian(harness) as custodian:
            custodian.settle_now(lease, [entry_of(message, ACK) for message in messages[:1]])

            report = custodian.settle(lease, Settlement(rest=RELEASE, settled_now=SettleReport()))

        assert report == SettleReport(acked=1, released=3)
        assert len(self.rest_of_queue(harness)) == 3

    def test_settling_now_reports_undone_messages(self, harness: Harness) -> None:
        lease, messages = self.send_and_hold(harness, 4)
        early = [entry_of(message, ACK) for message in messages[:2]]
        # Given an entry for a message that the lease does not hold, without a payload
        stranger = Entry("of nobody", "", Verdict(Action.RETRY, 0.0, "why", "process"))
        with self.custodian(harness) as custodian:
            report = custodian.settle_now(lease, [early[0], stranger, early[1]])

            assert (report.acked, report.failed + report.lapsed, report.total) == (2, 1, 3)
            assert report.undone == {"of nobody"}
            assert custodian.settle_now(lease, [early[0], stranger, early[1]]) == report
            assert custodian.settle(lease, settlement_of(messages[2:])) == SettleReport(acked=2)
        assert self.rest_of_queue(harness) == []

    def test_messages_received_after_an_immediate_settlement_can_be_settled_now_too(
        self, harness: Harness
    ) -> None:
        harness.send(bodies(4))
        with self.source(harness, "g1") as source, self.custodian(harness) as custodian:
            messages: list[Message] = []
            while len(messages) < 4:
                taken = self.take(source, 1)

                now = custodian.settle_now(source.lease, [entry_of(m, ACK) for m in taken])

                assert now == SettleReport(acked=len(taken))
                messages += taken
            source.stop()
            self.settle(harness, source.lease, settlement_of([]))
        assert self.rest_of_queue(harness) == []

    def test_a_run_does_not_receive_messages_that_it_released(self, harness: Harness) -> None:
        harness.send(bodies(3))
        with self.source(harness, "g1") as source, self.custodian(harness) as custodian:
            messages = self.take(source)
            entries = [
                entry_of(messages[0], Verdict(Action.RETRY, 0.0, "again", "process")),
                entry_of(messages[1], RELEASE),
            ]

            report = custodian.settle_now(source.lease, entries)

            assert report == SettleReport(requeued=1, released=1)
            assert self.take(source) == []
            if not self.shares:  # the third message is held and blocks the others
                source.stop()
                self.settle(harness, source.lease, settlement_of(messages[2:]))
        released = messages[:2] if self.independent else messages
        assert sorted(ids(self.rest_of_queue(harness))) == sorted(ids(released))
