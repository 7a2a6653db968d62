"""Pacing of retries and the end of an outage, on a manual clock."""

from __future__ import annotations

import statistics

import pytest

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    Attempts,
    Backoff,
    keep_trying,
)
from airflow_broadway.producers.rabbitmq.options import backoff_bounds
from airflow_broadway.testing import ManualClock

LOST = ProducerUnavailable("the connection is lost")


@pytest.fixture
def clock():
    return ManualClock()


def doubling(clock: ManualClock) -> Attempts:
    """Delays of 1, 2, 4, 8 and then 8 seconds, for 60."""
    return Attempts(Backoff("exp", 1.0, 8.0), 60.0, clock)


def test_first_use_failure_reconnects_immediately_then_with_delay(clock):
    attempts = doubling(clock)
    passed = []
    for _ in range(6):
        began = clock.monotonic()
        attempts.again(LOST)
        passed.append(clock.monotonic() - began)

    assert passed == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_failing_connections_time_out_like_outage(clock):
    attempts = doubling(clock)
    connections: list[int] = []

    def reconnect_forever() -> None:
        while len(connections) < 1000:
            attempts.again(LOST)
            connections.append(keep_trying(lambda: 1, attempts))

    with pytest.raises(ProducerUnavailable, match="is lost"):
        reconnect_forever()
    assert len(connections) == 10
    assert clock.monotonic() == 55.0  # the next delay would not fit


def test_success_resets_outage(clock):
    attempts = doubling(clock)
    for _ in range(100):
        attempts.again(LOST)
        attempts.again(LOST)
        attempts.worked()

    assert clock.monotonic() == 100.0


def test_stop_ends_backoff(clock):
    backoff = Backoff("exp", 30.0, 30.0)
    attempts = Attempts(backoff, 600.0, clock, lambda: clock.monotonic() >= 3.0)

    def connect() -> None:
        raise LOST

    with pytest.raises(ProducerUnavailable, match="is lost"):
        keep_trying(connect, attempts)
    assert clock.monotonic() < 4.0


def test_without_backoff_nothing_is_retried(clock):
    attempts = Attempts(Backoff("stop", 1.0, 1.0), 60.0, clock)

    attempts.again(LOST)
    with pytest.raises(ProducerUnavailable):
        attempts.again(LOST)


def test_random_backoff_stays_in_bounds_and_spreads():
    for kind in ("rand", "rand_exp"):
        backoff = Backoff(kind, *backoff_bounds(1.0, 30.0), seed=1)
        draws = [backoff.next() or 0.0 for _ in range(500)]

        assert all(1.0 <= draw <= 30.0 for draw in draws)
        assert statistics.pstdev(draws) > 1.0
