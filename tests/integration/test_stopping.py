"""Stops of each operator: finished work is recorded, and the other messages are released.

In real time, with callbacks that take 50 ms each.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException
from airflow.sdk.exceptions import AirflowTaskTimeout
from airflow.sdk.execution_time.timeout import timeout

from airflow_broadway.adapters.host import Host
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.producers.sqlite import SqliteQueue
from tests.integration.pipelines.slow import (
    FirstBatchSeesKill,
    OneHangs,
    QuickMessages,
    Slow,
    SlowHangs,
    SlowProcesses,
    SlowThreads,
    ThirdBatchHangs,
)
from tests.unit.operators.context import task_context

COUNT = 400
#: Seconds that a busy machine may add; all messages would take one processor twenty.
SPARE = 10.0


#: Each pipeline with its seconds of work: a process takes a while to start.
KINDS = [(Slow, 1.0), (SlowThreads, 1.0), (SlowProcesses, 4.0)]


class Place:
    """A queue with messages, a staging root, and a run's context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.staging = f"file://{folder}/staging"
        self.pushed: dict[str, Any] = {}
        self.queue = SqliteQueue(folder / "queue.db", "slow")
        self.queue.send([b"%d" % number for number in range(COUNT)])

    def context(self) -> Any:
        return task_context(map_index=0, pushed=self.pushed)

    def pipeline(self, kind: type[Slow], **options: Any) -> Slow:
        return kind(producer={"path": str(self.folder / "queue.db")}, **options)

    def process(self, pipeline: Slow, **options: Any) -> Any:
        return BroadwayProcessorOperator(
            task_id="task", pipeline=pipeline, staging=self.staging, idle_seconds=0.0, **options
        )

    def batch(self, pipeline: Slow, reference: Any) -> Any:
        return BroadwayBatcherOperator(
            task_id="task",
            pipeline=pipeline,
            staging=self.staging,
            batcher="default",
            processed=[reference],
        )

    def counts(self) -> tuple[int, int]:
        """Counts the ready and the leased messages."""
        depth = self.queue.depth()
        return depth.ready, depth.leased


def _timeout(seconds: float) -> Any:
    """Returns the timeout of Airflow's task runner for an ``execution_timeout``."""
    return timeout(seconds)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@contextmanager
def handling_sigterm(operator: Any, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Handles SIGTERM as Airflow's task runner does: calls ``on_kill``; the task continues."""

    def handle(*_: Any) -> None:
        operator.on_kill()
        then()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def kill_after(operator: Any, seconds: float) -> Iterator[None]:
    """Sends SIGTERM after ``seconds``."""
    with handling_sigterm(operator):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@pytest.mark.parametrize(("kind", "seconds"), KINDS)
def test_max_seconds_ends_process_after_the_current_message(place, kind, seconds):
    operator = place.process(place.pipeline(kind), max_seconds=seconds)
    started = time.monotonic()
    reference = operator.execute(place.context())
    assert time.monotonic() - started < seconds + SPARE
    assert reference["stopped"] == "max_seconds"
    staged = reference["batchers"]["default"]
    assert 4 <= staged < 200
    run = Host(place.context()).open_run(place.staging, place.pipeline(kind))
    if kind is Slow:
        manifest = run.manifest(reference["generation"])
        assert manifest is not None
        assert manifest.received == COUNT  # max_demand: as many as it may hold


@pytest.mark.parametrize(("kind", "seconds"), KINDS)
def test_on_kill_ends_process_within_shutdown_and_publishes_its_work(place, kind, seconds):
    operator = place.process(place.pipeline(kind, shutdown=0.5))
    started = time.monotonic()
    with kill_after(operator, seconds):
        reference = operator.execute(place.context())
    assert time.monotonic() - started < seconds + SPARE
    assert reference["stopped"] == "signal"
    assert 4 <= reference["batchers"]["default"] < 200


def test_on_kill_does_not_wait_for_a_hanging_callback(place):
    hangs = place.pipeline(SlowHangs, shutdown=0.2)
    operator = place.process(hangs)
    started = time.monotonic()
    with kill_after(operator, 0.5):
        reference = operator.execute(place.context())
    assert time.monotonic() - started < 2.0 + SPARE
    assert reference["batchers"]["default"] >= 1


def test_an_execution_timeout_stops_process_in_time(place):
    operator = place.process(place.pipeline(Slow), execution_timeout=timedelta(seconds=2.0))
    with _timeout(2.0):
        reference = operator.execute(place.context())
    assert reference["stopped"] == "max_seconds"
    assert 10 <= reference["batchers"]["default"] < 40


def test_a_message_beyond_the_execution_timeout_loses_no_other_work(place, caplog):
    operator = place.process(place.pipeline(OneHangs), execution_timeout=timedelta(seconds=60.0))
    # Then the task fails without retries: a retry would void the finished work
    with _timeout(60.0), pytest.raises(AirflowFailException, match="execution_timeout"):
        operator.execute(place.context())
    # and the work before the message is published for the downstream tasks
    reference = place.pushed["return_value"]
    assert reference["batchers"]["default"] == 30
    assert reference["stopped"] == "interrupted"
    # and the log names the slow message
    assert "ended handle_message at message" in caplog.text
    batch = place.batch(place.pipeline(OneHangs), reference)
    assert batch.execute(place.context())["outcomes"]["successful"] == 30


def test_on_kill_begins_no_further_batch(place):
    pipeline = place.pipeline(FirstBatchSeesKill, shutdown=30.0)
    reference = place.process(pipeline, max_messages=100).execute(place.context())
    operator = place.batch(pipeline, reference)
    FirstBatchSeesKill.killed.clear()
    with (
        handling_sigterm(operator, FirstBatchSeesKill.killed.set),
        pytest.raises(AirflowException, match="9 of 10 batches"),
    ):
        operator.execute(place.context())

    # And a retry runs only the batches without an outcome.
    retry = place.batch(place.pipeline(QuickMessages), reference)
    assert retry.execute(place.context())["outcomes"]["successful"] == 100


def test_an_execution_timeout_of_batch_keeps_finished_batches(place):
    pipeline = place.pipeline(ThirdBatchHangs)
    reference = place.process(pipeline, max_messages=40).execute(place.context())
    operator = place.batch(pipeline, reference)
    ThirdBatchHangs.handled.clear()
    with _timeout(60.0), pytest.raises(AirflowTaskTimeout):
        operator.execute(place.context())
    finished = list(ThirdBatchHangs.handled)
    assert len(finished) == 2
    retry = place.batch(place.pipeline(QuickMessages), reference)
    QuickMessages.handled.clear()
    assert retry.execute(place.context())["outcomes"]["successful"] == 40
    # Batches with an outcome are not handled again; the last may not have had its outcome yet.
    assert not set(finished[:-1]) & set(QuickMessages.handled)
