"""Twelve hours in the life of 100,000 messages, on a clock that is moved by hand.

The stub keeps Pub/Sub's rules: deadlines of 600 seconds at most, 2,500 ids and 512 KiB to a
request, the newest id only.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from tests.unit.producers.pubsub.kit import Place, place

HOUR = 3600.0
#: As a sensor looks: each time less than is left of a lease.
LOOK = 120.0
#: The larger one is what was promised; the smaller one says the same in a second.
SIZES = [1_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
SETTINGS = [{}, {"enable_exactly_once_delivery": True}]


def fill(at: Place, count: int) -> None:
    at.put(*(str(number) for number in range(count)))


@pytest.mark.parametrize("settings", SETTINGS, ids=["at least once", "exactly once"])
@pytest.mark.parametrize("count", SIZES)
def test_messages_are_held_for_twelve_hours_and_settled(tmp_path, count, settings):
    with place(tmp_path, **settings) as at:
        fill(at, count)
        run = at.begin(receive_concurrency=4, max_number_of_messages=1_000)
        ids: list[str] = []
        while len(ids) < count:
            ids += [message.message_id for message in run.take_more()]
        assert len(set(ids)) == count
        lease = run.source.lease
        run.source.close()
        # Looked at by a process that never received.
        custodian, began = run.other(), at.clock.now()
        at.broker.requests.clear()
        at.broker.entries.clear()

        while at.clock.now() < began + timedelta(hours=12):
            at.clock.advance(LOOK)
            renewed = custodian.renew(lease)
            assert renewed is not None
            assert renewed.deadline > at.clock.now()
            lease = renewed

        # Each is renewed every 240 seconds, in requests that are as full as may be.
        renewals = 12 * HOUR / 240
        assert at.broker.entries["ModifyAckDeadline"] <= (renewals + 1) * count
        assert at.broker.requests["ModifyAckDeadline"] <= (renewals + 1) * (count // 2_500 + 4)
        assert at.waiting() == []
        later = Verdict(Action.RETRY, 300.0, "later", "batch")
        retried, released = set(ids[: count // 10]), set(ids[count // 10 : count // 5])
        report = custodian.settle(
            lease,
            Settlement(
                rest=ACK,
                entries=lambda: (
                    Entry(each, "", later if each in retried else RELEASE)
                    for each in (*retried, *released)
                ),
                everything=lambda: (Entry(each, "", ACK) for each in ids),
                expected=count,
            ),
        )
        custodian.close()
        tenth = count // 10
        assert (report.acked, report.requeued, report.released) == (count - 2 * tenth, tenth, tenth)
        assert report.total == count
        assert at.left() == 2 * tenth
        assert len(at.waiting()) == tenth
        at.clock.advance(300.0)
        assert len(at.waiting()) == tenth


def test_what_nobody_renews_lapses_and_comes_back_marked(tmp_path):
    with place(tmp_path) as at:
        fill(at, 50)
        run = at.begin()
        ids = {message.message_id for message in run.take()}
        lease = run.source.lease
        run.source.close()
        custodian = run.other()
        at.clock.advance(600.0)

        assert custodian.renew(lease) is None
        again = at.begin().take()

        assert {message.message_id for message in again} == ids
        assert all(message.redelivered for message in again)
        report = custodian.settle(
            lease,
            Settlement(
                rest=ACK, everything=lambda: (Entry(each, "", ACK) for each in ids), expected=50
            ),
        )
        custodian.close()
        assert report.lapsed == 50
        assert at.broker.requests["Acknowledge"] == 0
        assert at.left() == 50


@pytest.mark.parametrize(
    ("runs", "each"), [(24, 100), pytest.param(72, 1_400, marks=pytest.mark.slow)]
)
def test_runs_of_twelve_hours_some_of_which_die_lose_nothing(tmp_path, runs, each):
    """A run now and then, while messages come; every fifth dies and is never settled."""
    with place(tmp_path) as at:
        sent, acked, marked, seen = 0, set[str](), set[str](), set[str]()
        for number in range(runs + 3):
            if number < runs:
                at.put(*(str(sent + more) for more in range(each)))
                sent += each
            run = at.begin(max_number_of_messages=1_000)
            messages = run.take()
            bodies = {message.data.decode() for message in messages}
            again = {message.data.decode() for message in messages if message.redelivered}
            assert bodies & seen == again & seen  # what was seen before says so
            marked |= again
            seen |= bodies
            run.source.stop()
            if number % 5 != 4 or number >= runs:
                report = run.settle(messages)
                assert report.acked == len(messages)
                assert not bodies & acked
                acked |= bodies
            run.close()
            at.clock.advance(12 * HOUR / runs)
        assert acked == {str(number) for number in range(sent)}
        assert marked
        assert at.left() == 0
