"""The numbers and permissions in the guides, compared with requests and code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.engine.custodian import RENEW_AT
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.pubsub.errors import PERMISSIONS
from airflow_broadway.producers.pubsub.limits import KEPT_DAYS
from tests.unit.producers.halves import renewed
from tests.unit.producers.pubsub.kit import open_subscription

GUIDE = (Path(__file__).parents[4] / "docs" / "pubsub.md").read_text("utf-8")
#: The guide as one line.
FLAT = " ".join(GUIDE.split())
MESSAGES = 1_000


def requests_of(folder: Path, *, renewals: int = 0, deadline: int = 10, **options: Any) -> float:
    """Returns the requests per message, from the pull to the end of the settlement."""
    with open_subscription(folder, ack_deadline_seconds=deadline) as sub:
        sub.put(*(str(number) for number in range(MESSAGES)))
        sub.broker.requests.clear()
        run = sub.begin(receive_concurrency=1, **options)
        messages: list[Message] = []
        while len(messages) < MESSAGES:
            messages += run.source.secure(run.source.receive(MESSAGES - len(messages), timeout=5.0))
        messages += run.source.stop()
        lease = run.source.lease
        for _ in range(renewals):
            sub.clock.advance(300.0)
            lease = renewed(run.custodian, lease)
        assert run.settle(messages).acked == MESSAGES
        return sum(sub.broker.requests.values()) / MESSAGES


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("defaults, all acknowledged", {}),
        ("… of a subscription whose own ack deadline is 600 s", {"deadline": 600}),
        ("… held so long that it is renewed once", {"renewals": 1}),
        ("`max_number_of_messages=10`", {"max_number_of_messages": 10}),
    ],
)
def test_guide_request_counts_are_measured(row, options, tmp_path):
    [table] = re.findall(r"<!-- START requests -->(.*?)<!-- END requests -->", GUIDE, re.DOTALL)
    [documented] = re.findall(rf"\| {re.escape(row)} \| ([\d.]+) \|", table)

    # The number of pulls varies by one or two.
    assert requests_of(tmp_path, **options) == pytest.approx(float(documented), abs=0.004)


def test_guide_lists_every_permission():
    for permission in PERMISSIONS.values():
        assert f"`{permission}`" in GUIDE, permission


def test_guide_numbers_match_code():
    producer = PubSubProducer(subscription="orders")
    assert producer.receive_concurrency == 4
    assert f"**The lease** is {producer.lease:g} s" in FLAT
    assert f"when {RENEW_AT:.0%} of it is left".replace("%", " %") in FLAT
    assert f"kept for {KEPT_DAYS} days" in FLAT
