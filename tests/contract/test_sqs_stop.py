"""The end of runs at a real server while somebody goes on publishing, counted by the server."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.stages.receiving import Budget, Receiving
from airflow_broadway.testing.harness import settlement_of
from tests.contract.sqs_harness import SqsHarness, moved_server
from tests.contract.test_sqs import harness_of

pytestmark = pytest.mark.broker


class Publisher(threading.Thread):
    """Sends ten messages, again and again, until it is told to end."""

    def __init__(self, harness: SqsHarness) -> None:
        super().__init__(daemon=True)
        self.harness = harness
        self.sent = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            self.harness.send([b"click %d" % (self.sent + place) for place in range(10)])
            self.sent += 10


@contextmanager
def publishing(harness: SqsHarness) -> Iterator[Publisher]:
    publisher = Publisher(harness)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.ended.set()
        publisher.join(30)


def in_real_time(harness: SqsHarness, generation: str) -> ProducerEnv:
    """Both halves of a run on the real clock: other tests move the one that the harness shares."""
    return dataclasses.replace(harness.env(generation), clock=SystemClock())


def one_run(harness: SqsHarness, number: int, budget: Budget) -> tuple[Lease, list[Message], int]:
    """As a process task does it, up to its manifest.

    :returns: What it holds, and how many messages the server hides, as of its stop: its manifest is
        written then, and its source closed only afterwards.
    """
    quick: dict[str, Any] = {"wait_time_seconds": 1, "receive_interval": 0.1}
    producer = dataclasses.replace(harness.producer(), **quick)
    env = in_real_time(harness, f"g{number}")
    clock, (server, _) = env.clock, moved_server()
    source = producer.source(env)
    try:
        intake = Receiving(
            source, budget, clock=clock, limiter=RateLimiter(None, clock), demand=1000
        )
        messages = [message for dispatch in intake for message in dispatch]
        messages += intake.stop()  # received, and its time was over before it was handed out
        assert intake.received == len(messages)
        assert source.lease.state["messages"] == len(messages)
        return source.lease, messages, server.depth(harness.queue)[1]
    finally:
        source.close()


@pytest.mark.parametrize(
    "suffix",
    [pytest.param("", id="standard"), pytest.param(".fifo", id="fifo", marks=pytest.mark.slow)],
)
def test_what_arrives_while_runs_end_is_in_the_next_one_or_in_the_queue(
    tmp_path: Path, suffix: str
) -> None:
    harness = harness_of(tmp_path, suffix)
    server, _ = moved_server()
    budgets = [
        Budget(max_seconds=0.5),
        Budget(max_messages=7),
        Budget(max_bytes=50),
        Budget(max_seconds=0.2),
        Budget(max_messages=23, idle_seconds=0.5),
    ]
    handled: list[str] = []
    with publishing(harness) as publisher:
        for number, budget in enumerate(budgets):
            lease, messages, hidden = one_run(harness, number, budget)

            # The server hides what the run holds, and nothing else: not even while others send.
            assert hidden == len(messages)
            custodian = harness.producer().custodian(in_real_time(harness, "custodian"))
            assert custodian.settle(lease, settlement_of(messages, rest=ACK)).acked == len(messages)
            custodian.close()
            handled += [message.data.decode() for message in messages]
    assert handled
    # Nobody sends any more: what is left comes at once, none has to wait for a lease to lapse.
    while messages := one_run(harness, len(handled) + 100, Budget(idle_seconds=0.3))[1]:
        handled += [message.data.decode() for message in messages]
        if suffix:
            break  # groups are held by this run until it is settled
    visible, hidden, _ = server.depth(harness.queue)
    assert len(handled) == len(set(handled))
    assert len(handled) + visible == publisher.sent
    assert hidden == len(messages) or not suffix
