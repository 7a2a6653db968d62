"""Twelve hours in the life of 100,000 messages, on a manual clock.

The client keeps SQS's rules: the twelve hours from each receipt, ten entries to a request, the
newest receipt only.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from tests.unit.producers.halves import renewed
from tests.unit.producers.sqs.kit import halves, options

COUNT = 100_000
HOUR = 3600.0


@pytest.fixture
def staging(tmp_path):
    return f"file://{tmp_path}"


def test_hundred_thousand_messages_are_leased_twelve_hours_and_settled(staging, caplog):
    caplog.set_level(logging.WARNING, "airflow_broadway.producers.sqs")
    with halves(staging, lease=6 * HOUR) as run:
        fake, clock = run.fake, run.clock
        fake.log = None
        fake.put([str(number) for number in range(COUNT)])
        began = clock.now()

        ids = [message.message_id for message in run.take()]
        assert len(set(ids)) == COUNT
        assert fake.requests["ReceiveMessage"] <= COUNT / 10 + 100
        lease = run.source.lease
        run.source.close()

        # A process that never received looks every quarter of an hour, as a sensor does.
        custodian = run.other()
        while clock.now() < began + timedelta(hours=11.5):
            clock.advance(HOUR / 4)
            lease = renewed(custodian, lease)
            assert lease.deadline > clock.now()
            assert lease.deadline <= began + timedelta(hours=12)
        # At least half a lease between two renewals of a message.
        assert fake.entries["ChangeMessageVisibility"] <= 8 * COUNT
        assert fake.waiting() == []
        [warning] = [line for line in caplog.messages if "12 hours" in line]
        assert "lapses at" in warning

        retried, released = set(ids[:1000]), set(ids[1000:3000])
        later = Verdict(Action.RETRY, 2 * HOUR, "later", "batch")
        settlement = Settlement(
            rest=ACK,
            entries=lambda: (
                Entry(key, "", later if key in retried else RELEASE)
                for key in (*retried, *released)
            ),
            everything=lambda: (Entry(key, "", ACK) for key in ids),
            expected=COUNT,
        )
        report = custodian.settle(lease, settlement)

        assert (report.acked, report.requeued, report.released) == (COUNT - 3000, 1000, 2000)
        assert report.total == COUNT
        cut, near = report.errors
        assert near.startswith("settled 30 minutes before SQS's limit of 12 hours from receipt")
        assert "the delay of 1,000 messages was cut" in cut
        assert fake.requests["DeleteMessage"] == (COUNT - 3000) / 10
        assert fake.left() == 3000
        assert len(fake.waiting()) == 2000
        clock.advance(HOUR / 2)
        assert len(fake.waiting()) == 3000
        custodian.close()


@options(staged=True, lease=4 * HOUR)
def test_all_messages_lapse_after_twelve_hours(staging, run):
    run.fake.put([str(number) for number in range(50)])
    ids = [message.message_id for message in run.take()]
    lease = run.source.lease
    custodian = run.other()
    for _ in range(47):
        run.clock.advance(HOUR / 4)
        lease = renewed(custodian, lease)
    run.clock.advance(HOUR / 4)

    assert custodian.renew(lease) is None
    report = custodian.settle(
        lease,
        Settlement(rest=ACK, everything=lambda: (Entry(key, "", ACK) for key in ids), expected=50),
    )

    assert report.lapsed == 50
    assert report.errors == ("the lease had reached SQS's limit of 12 hours from receipt",)
    assert len(run.fake.waiting()) == 50
    assert run.fake.requests["DeleteMessage"] == 0
