from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_broadway.core.custody.lease_renewer import LeaseRenewer
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import LeaseLapsed, ProducerUnavailable

LEASE = Lease(kind="test", generation="g1", seconds=0.02, deadline=datetime(2026, 1, 1, tzinfo=UTC))


class Custodian:
    """Answers each renewal with the next of its answers, and the last again and again."""

    def __init__(self, *answers: Any, done: int = 2) -> None:
        self.answers = list(answers)
        self.renewals = 0
        self.closed = False
        self.enough = threading.Event()
        self._done = done

    def renew(self, lease: Lease) -> Lease | None:
        self.renewals += 1
        if self.renewals >= self._done:
            self.enough.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if answer is None else replace(lease, deadline=answer)

    def close(self) -> None:
        self.closed = True


def test_leases_are_renewed_until_stopped():
    later = LEASE.deadline + timedelta(seconds=1)
    custodian = Custodian(later)
    renewed: list[Lease] = []

    with LeaseRenewer(lambda: custodian, 0.02, lambda: [LEASE], renewed=renewed.append):
        assert custodian.enough.wait(10)

    assert renewed[0].deadline == later
    assert custodian.closed


def test_unreachable_broker_is_retried():
    custodian = Custodian(ProducerUnavailable("away"), LEASE.deadline)

    with LeaseRenewer(lambda: custodian, 0.02, lambda: [LEASE]) as renewer:
        assert custodian.enough.wait(10)

    renewer.check()


def test_lapsed_lease_is_reported_and_not_renewed_again():
    custodian = Custodian(None, done=1)

    with LeaseRenewer(lambda: custodian, 0.02, lambda: [LEASE]) as renewer:
        assert custodian.enough.wait(10)

    assert renewer.lapsed
    assert custodian.renewals == 1
    with pytest.raises(LeaseLapsed, match="clear `process`"):
        renewer.check()


def test_other_leases_are_renewed_after_one_has_lapsed():
    custodian = Custodian(None, LEASE.deadline, done=3)
    leases = [LEASE, replace(LEASE, generation="g2")]

    with LeaseRenewer(lambda: custodian, 0.02, lambda: leases) as renewer:
        assert custodian.enough.wait(10)

    assert renewer.lapsed


def test_nothing_is_opened_without_a_lease():
    requested = threading.Event()

    def none():
        requested.set()
        return []

    with LeaseRenewer(lambda: pytest.fail("opened"), 0.02, none):
        assert requested.wait(10)


def test_at_once_renews_immediately():
    custodian = Custodian(LEASE.deadline, done=1)

    with LeaseRenewer(lambda: custodian, 86_400.0, lambda: [LEASE], at_once=True):
        assert custodian.enough.wait(10)
