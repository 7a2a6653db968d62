"""How a settlement counts the messages of a holding queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action
from airflow_broadway.producers.kit.guard import MessageGuard
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.settle.settlement import LeaseSettlement
from airflow_broadway.testing.clock import ManualClock


def report_of(generation: str, settlement: Settlement, read: int) -> SettleReport:
    clock = ManualClock()
    lease = Lease(
        kind="rabbitmq",
        generation=generation,
        seconds=60.0,
        deadline=clock.now(),
        owner={},
        state={"bundles": 1, "messages": 4, "extra": 1},
    )
    outbox: Any = SimpleNamespace(guard=MessageGuard(), finish=dict)
    work = LeaseSettlement(QueueJournal(None, "counted"), lease, settlement, outbox)
    for number in range(read):
        message = Held(f"m{number}", 1, False, b"\x00\x00", b"\x00\x00", b"")
        work._outcome.note(message, Action.RELEASE)
    return work._report()


@pytest.mark.parametrize(
    ("read", "report"),
    [
        # An unconfirmed bundle was published, and its messages were received again.
        (8, SettleReport(released=4)),
        (4, SettleReport(released=4)),
        (1, SettleReport(released=1, lapsed=3)),
    ],
)
def test_released_message_outside_manifest_is_not_counted(read, report):
    counted = report_of(f"g{read}", Settlement(rest=RELEASE, expected=4), read)

    assert (counted.released, counted.lapsed, counted.total) == (report.released, report.lapsed, 4)


def test_without_manifest_released_messages_count():
    assert report_of("g", Settlement(rest=RELEASE), 8) == SettleReport(released=8)
