"""The custody contract: killed processes, and concurrent ones."""

from __future__ import annotations

import random
import time

import pytest

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.verdicts import ACK, Action, Verdict
from airflow_broadway.core.formats.entries import dump_entry
from airflow_broadway.testing.contract.base import ContractBase
from airflow_broadway.testing.harness import Harness, bodies, ids, settlement_of
from airflow_broadway.testing.other_process import Child


class Killing(ContractBase):
    """The promises for killed processes."""

    def test_a_kill_between_receive_and_settle_loses_nothing(self, harness: Harness) -> None:
        harness.send(bodies(500))
        began = harness.clock.monotonic()
        with Child(harness, "hold", "killed", "300") as child:
            held = child.line()
            assert len(held["ids"]) == 300
            child.kill()

        before = self.rest_of_queue(harness, "before the lapse")
        held_still = harness.clock.monotonic() - began < harness.lease
        harness.pass_time(harness.lease * 1.1)
        after = self.rest_of_queue(harness, "after the lapse")

        if held_still:  # otherwise the machine is so slow that the lease lapsed before
            assert len(before) == (200 if self.shares else 0)
        again = [message for message in [*before, *after] if message.message_id in held["ids"]]
        assert sorted(ids(again)) == sorted(held["ids"])
        assert all(message.redelivered for message in again)
        assert len(before) + len(after) == 500

    @pytest.mark.parametrize("seed", range(5))
    def test_a_kill_during_a_settlement_loses_nothing(self, harness: Harness, seed: int) -> None:
        self.need_independent()
        count = self.many
        lease, messages = self.send_and_hold(harness, count, "settled")
        # Every third is retried, every seventh of the others a dead letter.
        entries = [entry_of(m, _third_and_seventh(place)) for place, m in enumerate(messages)]
        verdicts = {entry.message_id: entry.verdict for entry in entries if entry.verdict != ACK}
        settlement = settlement_of(messages, verdicts)
        with Child(harness, "settle") as child:
            child.send({"lease": lease.to_json(), "entries": list(map(dump_entry, entries))})
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

    def test_two_concurrent_processes_never_share_a_message(self, harness: Harness) -> None:
        harness.send(bodies(2_000))

        with Child(harness, "drain", "one") as one, Child(harness, "drain", "two") as two:
            drained = [one.line()["ids"], two.line()["ids"]]

        all_ids = [*drained[0], *drained[1]]
        assert len(all_ids) == len(set(all_ids)) == 2_000


def _third_and_seventh(place: int) -> Verdict:
    """Returns the verdict for the n-th message: retry, dead-letter, or mostly acknowledge."""
    if place % 3 == 0:
        return Verdict(Action.RETRY, 1.0, "every third", "batch")
    if place % 7 == 0:
        return Verdict(Action.DEAD_LETTER, 0.0, "every seventh", "process")
    return ACK
