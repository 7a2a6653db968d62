"""Twelve hours in the life of 100,000 messages, on a manual clock.

The stub keeps Pub/Sub's rules: deadlines of 600 seconds at most, 2,500 ids and 512 KiB to a
request, the newest id only.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from tests.unit.producers.halves import renewed
from tests.unit.producers.pubsub.kit import SubscriptionHarness

HOUR = 3600.0
#: How often a sensor looks.
LOOK = 120.0
#: The larger one is the promise; the smaller one tests the same in a second.
SIZES = [1_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
SETTINGS = [{}, {"enable_exactly_once_delivery": True}]


def fill(sub: SubscriptionHarness, count: int) -> None:
    sub.put(*(str(number) for number in range(count)))


@pytest.mark.parametrize("sub", SETTINGS, ids=["at least once", "exactly once"], indirect=True)
@pytest.mark.parametrize("count", SIZES)
def test_messages_are_leased_for_twelve_hours_and_settled(count, sub):
    fill(sub, count)
    run = sub.begin(receive_concurrency=4, max_number_of_messages=1_000)
    ids: list[str] = []
    while len(ids) < count:
        ids += [message.message_id for message in run.take_more()]
    assert len(set(ids)) == count
    lease = run.source.lease
    run.source.close()
    # A process that never received looks at it.
    custodian, began = run.other(), sub.clock.now()
    sub.broker.requests.clear()
    sub.broker.entries.clear()

    while sub.clock.now() < began + timedelta(hours=12):
        sub.clock.advance(LOOK)
        lease = renewed(custodian, lease)
        assert lease.deadline > sub.clock.now()

    # Every message is renewed every 240 seconds, in full requests.
    renewals = 12 * HOUR / 240
    assert sub.broker.entries["ModifyAckDeadline"] <= (renewals + 1) * count
    assert sub.broker.requests["ModifyAckDeadline"] <= (renewals + 1) * (count // 2_500 + 4)
    assert sub.drain() == []
    later = Verdict(Action.RETRY, 300.0, "later", "batch")
    retried, released = set(ids[: count // 10]), set(ids[count // 10 : count // 5])
    request = Settlement(
        rest=ACK,
        entries=lambda: (
            Entry(key, "", later if key in retried else RELEASE) for key in (*retried, *released)
        ),
        everything=lambda: (Entry(key, "", ACK) for key in ids),
        expected=count,
    )
    report = custodian.settle(lease, request)
    custodian.close()
    tenth = count // 10
    assert (report.acked, report.requeued, report.released) == (count - 2 * tenth, tenth, tenth)
    assert report.total == count
    assert sub.left() == 2 * tenth
    assert len(sub.drain()) == tenth
    sub.clock.advance(300.0)
    assert len(sub.drain()) == tenth


@pytest.mark.parametrize(
    ("runs", "count"), [(24, 100), pytest.param(72, 1_400, marks=pytest.mark.slow)]
)
def test_twelve_hours_of_dying_runs_lose_nothing(runs, count, sub):
    """Every fifth run dies, and is never settled."""
    sent, acked, marked, seen = 0, set[str](), set[str](), set[str]()
    for number in range(runs + 3):
        if number < runs:
            sub.put(*(str(sent + more) for more in range(count)))
            sent += count
        run = sub.begin(max_number_of_messages=1_000)
        messages = run.take()
        bodies = {message.data.decode() for message in messages}
        again = {message.data.decode() for message in messages if message.redelivered}
        assert bodies & seen == again & seen  # every redelivery is marked
        marked |= again
        seen |= bodies
        run.source.stop()
        if number % 5 != 4 or number >= runs:
            assert run.settle(messages).acked == len(messages)
            assert not bodies & acked
            acked |= bodies
        run.close()
        sub.clock.advance(12 * HOUR / runs)
    assert acked == {str(number) for number in range(sent)}
    assert marked
    assert sub.left() == 0
