"""Receives in flight, executed one at a time by the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.producers.engine.polls import Polls
from airflow_broadway.producers.engine.port import Answer
from tests.unit.producers.engine.adapters import EmptyBroker


class ManualPool:
    """An executor that runs a job when the test calls it."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., None], *args: Any, **options: Any) -> None:
        self.jobs.append(lambda: function(*args, **options))


def test_a_failed_receive_cancels_those_submitted_before_it(monkeypatch):
    demands: list[int] = []

    def fail(demand: int) -> Answer:
        demands.append(demand)
        raise ConnectionError("refused")

    broker = EmptyBroker(ProducerEnv())
    polls = Polls(broker, fail)
    pool = ManualPool()
    monkeypatch.setattr(polls, "_pool", pool)
    polls.want(3 * broker.max_fetch)
    first, *rest = pool.jobs
    assert len(rest) == 2

    first()
    with pytest.raises(ConnectionError):  # the run's thread is faster than the pool's next job
        polls.take(0.0)
    for job in rest:
        job()

    assert demands == [broker.max_fetch]
    assert not polls.flying
    polls.want(broker.max_fetch)
    assert len(pool.jobs) == 4
