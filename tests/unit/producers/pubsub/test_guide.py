"""What ``docs/pubsub.md`` says of requests and permissions, held against what is sent."""

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
from tests.unit.producers.pubsub.kit import place

GUIDE = (Path(__file__).parents[4] / "docs" / "pubsub.md").read_text("utf-8")
#: As one line, wherever its lines end.
FLAT = " ".join(GUIDE.split())
MESSAGES = 1_000


def requests_of(folder: Path, *, held: int = 0, deadline: int = 10, **options: Any) -> float:
    """Requests per message, from the pull to the end of the settlement.

    :param held: How often the lease is renewed.
    """
    with place(folder, ack_deadline_seconds=deadline) as at:
        at.put(*(str(number) for number in range(MESSAGES)))
        at.broker.requests.clear()
        run = at.begin(receive_concurrency=1, **options)
        messages: list[Message] = []
        while len(messages) < MESSAGES:
            messages += run.source.secure(run.source.receive(MESSAGES - len(messages), timeout=5.0))
        messages += run.source.stop()
        lease = run.source.lease
        for _ in range(held):
            at.clock.advance(300.0)
            renewed = run.custodian.renew(lease)
            assert renewed is not None
            lease = renewed
        assert run.settle(messages).acked == MESSAGES
        return sum(at.broker.requests.values()) / MESSAGES


@pytest.mark.parametrize(
    ("row", "given"),
    [
        ("defaults, all acknowledged", {}),
        ("… of a subscription whose own ack deadline is 600 s", {"deadline": 600}),
        ("… held so long that it is renewed once", {"held": 1}),
        ("`max_number_of_messages=10`", {"max_number_of_messages": 10}),
    ],
)
def test_the_guides_requests_are_those_that_are_sent(row, given, tmp_path):
    [table] = re.findall(r"<!-- START requests -->(.*?)<!-- END requests -->", GUIDE, re.DOTALL)
    [said] = re.findall(rf"\| {re.escape(row)} \| ([\d.]+) \|", table)

    # Which pull brings the last ones is chance: one more, or two, make no difference to speak of.
    assert requests_of(tmp_path, **given) == pytest.approx(float(said), abs=0.004)


def test_every_permission_that_is_asked_for_is_in_the_guide():
    for permission in PERMISSIONS.values():
        assert f"`{permission}`" in GUIDE, permission


def test_the_guides_numbers_are_the_codes():
    producer = PubSubProducer(subscription="orders")
    most, wait = producer.max_number_of_messages, producer.receive_timeout
    assert f"| `max_number_of_messages` | 10 | {most}, four pulls at a time |" in FLAT
    assert producer.receive_concurrency == 4
    assert f"| `receive_timeout` | for ever | {wait:g} s" in FLAT
    assert f"**The lease** is {producer.lease:g} s" in FLAT
    assert f"when {RENEW_AT:.0%} of it is left".replace("%", " %") in FLAT
    assert f"kept for {KEPT_DAYS} days" in FLAT
