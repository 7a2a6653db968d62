"""Immediate verdicts: every message is in exactly one class of the account."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway.core.custody import in_process
from airflow_broadway.core.custody.in_process import Settler
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message

LEASE = Lease(kind="fake", generation="g", seconds=60.0, deadline=datetime(2026, 1, 1, tzinfo=UTC))


class Custodian:
    """Leases messages, and fails to settle some of them for a reason."""

    def __init__(self, leased: list[Message], undone: Iterable[str], reason: str) -> None:
        self.leased = [message.message_id for message in leased]
        self.undone = set(undone)
        self.reason = reason
        self.done: set[str] = set()
        self.closed = False

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        report = SettleReport()
        for entry in entries:
            report += self._settle(entry.message_id, acked=1)
        return report

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        assert settlement.everything is not None
        left = [message_id for message_id in self.leased if message_id not in self.done]
        assert sorted(entry.message_id for entry in settlement.everything()) == left
        acked = {entry.message_id for entry in settlement.entries()}
        report = SettleReport()
        for message_id in left:
            count = "acked" if message_id in acked else "released"
            report += self._settle(message_id, **{count: 1})
        return report

    def _settle(self, message_id: str, **count: int) -> SettleReport:
        if message_id not in self.undone:
            self.done.add(message_id)
            return SettleReport(**count)  # type: ignore[arg-type]
        undone = frozenset([message_id])
        if self.reason == "lapsed":
            return SettleReport(lapsed=1, undone=undone)
        return SettleReport(failed=1, errors=("refused",), undone=undone)

    def close(self) -> None:
        self.closed = True


def messages(count: int) -> list[Message]:
    return [
        Message(b"", message_id=f"m-{number}", acknowledger=AckRef(object(), "g", None))
        for number in range(count)
    ]


def settler_of(custodian: Any, messages: list[Message]) -> Settler:
    settler = Settler(lambda: custodian, lambda: LEASE, threaded=False)
    settler.hold(messages)
    return settler


@pytest.mark.parametrize("reason", ["failed", "lapsed"])
def test_refused_verdicts_are_counted_once_at_the_end(reason):
    # Given verdicts on six of seven messages, of which the broker does not carry out two
    leased = messages(7)
    custodian = Custodian(leased, ["m-1", "m-4"], reason)
    settler = settler_of(custodian, leased)
    settler.record("process", [(message, ACK) for message in leased[:6]], [])

    # When they are carried out on the way, and the run ends
    settler.tick(force=True)
    report = settler.finish()

    # Then every message is in one class
    assert report.total == 7
    assert (report.acked, report.released, getattr(report, reason)) == (4, 1, 2)
    assert custodian.closed


def test_refused_verdicts_are_retried_at_the_end():
    leased = messages(3)
    custodian = Custodian(leased, ["m-1"], "failed")
    settler = settler_of(custodian, leased)
    settler.record("process", [(message, ACK) for message in leased], [])
    settler.tick(force=True)

    custodian.undone.clear()
    report = settler.finish()

    # Then it is settled, and the reason of the refusal is reported all the same
    assert (report.acked, report.failed, report.total) == (3, 0, 3)
    assert report.errors == ("refused",)


@pytest.mark.parametrize("reason", ["failed", "lapsed"])
def test_partial_immediate_settlement_counts_though_it_raises(reason):
    # Given a callback that settles three messages immediately, of which the broker refuses one
    leased = messages(4)
    settler = settler_of(Custodian(leased, ["m-1"], reason), leased)
    error: type[BroadwayError] = LeaseLapsed if reason == "lapsed" else ProducerError
    with pytest.raises(error):
        settler.settle_now("process", [(message, ACK) for message in leased[:3]], [])

    # When the callback's failure records another verdict for all of them
    settler.record("process", [], [(message, ACK) for message in leased[:3]])
    report = settler.finish()

    # Then the immediate verdict stands for the settled ones
    assert report.total == 4
    assert (report.acked, report.released, getattr(report, reason)) == (2, 1, 1)


def test_verdicts_are_carried_out_in_bulk(monkeypatch):
    monkeypatch.setattr(in_process, "_BULK_INTERVAL", 3600.0)
    leased = messages(1001)
    custodian = Custodian(leased, [], "")
    settler = settler_of(custodian, leased)
    settler.record("process", [(leased[0], ACK)], [])
    settler.tick()
    assert not custodian.done

    settler.record("process", [(message, ACK) for message in leased[1:1000]], [])
    assert len(custodian.done) == 1000


@pytest.mark.parametrize("reason", ["failed", "lapsed"])
def test_report_without_unsettled_ids_is_refused(reason):
    class Silent(Custodian):
        def settle_now(self, lease, entries):
            return replace(super().settle_now(lease, entries), undone=frozenset())

    leased = messages(3)
    settler = settler_of(Silent(leased, ["m-1"], reason), leased)

    with pytest.raises(ProducerError, match=" 1 of 3 messages as not settled, and names 0"):
        settler.settle_now("process", [(message, ACK) for message in leased], [])


def test_two_immediate_verdicts_on_one_message_are_one():
    [message] = messages(1)
    settler = settler_of(Custodian([message], [], ""), [message])

    settler.settle_now("process", [(message, ACK), (message, ACK)], [])

    assert settler.finish() == SettleReport(acked=1)
