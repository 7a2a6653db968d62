"""How a settlement counts what it read of a lease queue."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action
from airflow_broadway.producers.rabbitmq.bundle import Held
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.settle.reading import BundlesRead
from airflow_broadway.producers.rabbitmq.settle.settlement import LeaseSettlement
from airflow_broadway.testing.clock import ManualClock


def settlement_of(generation: str) -> LeaseSettlement:
    clock = ManualClock()
    lease = Lease(
        kind="rabbitmq",
        generation=generation,
        seconds=60.0,
        deadline=clock.now(),
        owner={},
        state={"bundles": 1, "messages": 4, "extra": 1},
    )
    nothing: Any = None
    journal = QueueJournal(None, "counted")
    return LeaseSettlement(nothing, nothing, journal, lease, "q", clock, lambda: ("turn", False))


def released(count: int) -> BundlesRead:
    read = BundlesRead({})
    read.bundles["b"] = []
    for number in range(count):
        held = Held(f"m{number}", 1, False, b"\x00\x00", b"\x00\x00", b"")
        read.note("b", held, Action.RELEASE)
    return read


@pytest.mark.parametrize(
    ("read", "report"),
    [
        # A bundle whose confirm never came is there, and its messages were received again.
        (8, SettleReport(released=4)),
        (4, SettleReport(released=4)),
        (1, SettleReport(released=1, lapsed=3)),
    ],
)
def test_what_is_given_back_and_in_no_manifest_is_in_nobodys_account(
    read: int, report: SettleReport
) -> None:
    settling = settlement_of(f"g{read}")
    given = Settlement(rest=RELEASE, expected=4)

    assert settling._report(given, released(read), {}, held=False) == report


def test_without_a_manifest_all_that_is_given_back_counts() -> None:
    assert settlement_of("g")._report(
        Settlement(rest=RELEASE), released(8), {}, held=False
    ) == SettleReport(released=8)
