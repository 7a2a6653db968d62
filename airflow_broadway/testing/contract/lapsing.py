"""The custody contract: renewal, lapse and end of leases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.testing.contract.base import ContractBase
from airflow_broadway.testing.harness import Harness, bodies, ids, settlement_of


class Lapsing(ContractBase):
    """The promises for renewed, lapsed and ended leases."""

    def test_a_renewed_lease_outlives_its_first_deadline(self, harness: Harness) -> None:
        if not harness.producer().renews:
            pytest.skip("leases of this producer have a fixed bound")
        lease, messages = self.send_and_hold(harness, 4)
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

    def test_messages_of_a_lapsed_lease_are_redelivered_and_marked(self, harness: Harness) -> None:
        lease, messages = self.send_and_hold(harness, 5)
        harness.pass_time(harness.lease * 1.1)

        with self.custodian(harness) as custodian:
            assert not custodian.holds(lease)
        again = self.rest_of_queue(harness)

        assert sorted(ids(again)) == sorted(ids(messages))
        assert sorted(message.data for message in again) == bodies(5)
        assert all(message.redelivered for message in again)
        if self.keeps_attempt:
            assert all(message.attempt == 1 for message in again)

    def test_a_zombie_settles_no_message_of_another_generation(self, harness: Harness) -> None:
        if not self.tells_lapse:
            pytest.skip("this broker gives no signal of a lapse")
        old, messages = self.send_and_hold(harness, 6, "zombie")
        harness.pass_time(harness.lease * 1.1)
        new, again = self.hold(harness, "heir")
        assert len(again) == 6

        with self.custodian(harness) as custodian:
            dead = Verdict(Action.DEAD_LETTER, 0.0, "zombie", "process")
            early = [entry_of(message, dead) for message in messages[:2]]
            verdicts = {messages[2].message_id: dead}
            undone = frozenset(ids(messages[:2]))
            assert custodian.settle_now(old, early) == SettleReport(lapsed=2, undone=undone)
            report = custodian.settle(old, settlement_of(messages, verdicts))
            assert report == SettleReport(lapsed=6)
            assert custodian.settle(old, settlement_of(messages, verdicts)) == report
            if harness.producer().renews:
                assert custodian.renew(old) is None
            assert not custodian.holds(old)

            assert custodian.holds(new)
            assert custodian.settle(new, settlement_of(again)) == SettleReport(acked=6)

    def test_messages_that_a_zombie_settled_immediately_do_not_lapse(
        self, harness: Harness
    ) -> None:
        if not self.tells_lapse:
            pytest.skip("this broker gives no signal of a lapse")
        old, messages = self.send_and_hold(harness, 6, "zombie")
        with self.custodian(harness) as custodian:
            early = [entry_of(message, ACK) for message in messages[:2]]
            assert custodian.settle_now(old, early) == SettleReport(acked=2)
        harness.pass_time(harness.lease * 1.1)
        new, again = self.hold(harness, "heir")
        assert len(again) == 4

        with self.custodian(harness) as custodian:
            settlement = replace(settlement_of(messages[2:]), settled_now=SettleReport(acked=2))
            assert custodian.settle(old, settlement) == SettleReport(lapsed=4)

            assert custodian.settle(new, settlement_of(again)) == SettleReport(acked=4)

    def test_a_generation_with_an_ended_lease_receives_nothing(self, harness: Harness) -> None:
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
