"""Verdicts that are carried out as they come: each message in exactly one class of the account."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway.core.custody.in_process import Settler
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.core.errors import BroadwayError, LeaseLapsed, ProducerError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message

LEASE = Lease(kind="fake", generation="g", seconds=60.0, deadline=datetime(2026, 1, 1, tzinfo=UTC))


class Custodian:
    """Holds messages, and does not settle some of them, for the reason given."""

    def __init__(self, held: list[Message], undone: Iterable[str], reason: str) -> None:
        self.held = [message.message_id for message in held]
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
        left = [message_id for message_id in self.held if message_id not in self.done]
        assert sorted(entry.message_id for entry in settlement.everything()) == left
        acked = {entry.message_id for entry in settlement.entries()}
        report = SettleReport()
        for message_id in left:
            report += self._settle(
                message_id, **{"acked" if message_id in acked else "released": 1}
            )
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


def settler_of(custodian: Any) -> Settler:
    return Settler(lambda: custodian, lambda: LEASE, threaded=False)


@pytest.mark.parametrize("reason", ["failed", "lapsed"])
def test_what_is_refused_on_the_way_is_counted_once_at_the_end(reason: str) -> None:
    # Given verdicts on six of seven messages, of which the broker does not carry out two
    given = messages(7)
    custodian = Custodian(given, ["m-1", "m-4"], reason)
    settler = settler_of(custodian)
    settler.hold(given)
    settler.record("process", [(each, ACK) for each in given[:6]], [])

    # When they are carried out on the way, and the run ends
    settler.tick(force=True)
    report = settler.finish()

    # Then each message is in one class
    assert report.total == 7
    assert (report.acked, report.released, getattr(report, reason)) == (4, 1, 2)
    assert custodian.closed


def test_what_is_refused_on_the_way_is_tried_once_more_at_the_end() -> None:
    given = messages(3)
    custodian = Custodian(given, ["m-1"], "failed")
    settler = settler_of(custodian)
    settler.hold(given)
    settler.record("process", [(each, ACK) for each in given], [])
    settler.tick(force=True)

    custodian.undone.clear()
    report = settler.finish()

    # Then it is settled, and why it was refused is told all the same
    assert (report.acked, report.failed, report.total) == (3, 0, 3)
    assert report.errors == ("refused",)


@pytest.mark.parametrize("reason", ["failed", "lapsed"])
def test_what_is_done_of_a_settlement_at_once_counts_though_it_raises(reason: str) -> None:
    # Given a callback that settles three messages at once, of which the broker refuses one
    given = messages(4)
    custodian = Custodian(given, ["m-1"], reason)
    settler = settler_of(custodian)
    settler.hold(given)
    error: type[BroadwayError] = LeaseLapsed if reason == "lapsed" else ProducerError
    with pytest.raises(error):
        settler.settle_now("process", [(each, ACK) for each in given[:3]], [])

    # When the callback's failure gives all of them another verdict
    settler.record("process", [], [(each, ACK) for each in given[:3]])
    report = settler.finish()

    # Then what was done has the first alone
    assert report.total == 4
    assert (report.acked, report.released, getattr(report, reason)) == (2, 1, 1)


def test_a_report_that_does_not_say_which_were_not_settled_is_refused() -> None:
    class Silent(Custodian):
        def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
            return replace(super().settle_now(lease, entries), undone=frozenset())

    given = messages(3)
    settler = settler_of(Silent(given, ["m-1"], "failed"))
    settler.hold(given)

    with pytest.raises(ProducerError, match="1 of 3 messages as not settled, and names 0"):
        settler.settle_now("process", [(each, ACK) for each in given], [])


def test_two_verdicts_at_once_on_one_message_are_one() -> None:
    [message] = messages(1)
    settler = settler_of(Custodian([message], [], ""))
    settler.hold([message])

    settler.settle_now("process", [(message, ACK), (message, ACK)], [])

    assert settler.finish() == SettleReport(acked=1)
