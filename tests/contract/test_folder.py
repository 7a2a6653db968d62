"""The producer in ``docs/producers.md`` passes the whole contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from airflow_broadway import Broadway, Message, Processors, RetryPolicy
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.testing.contract import CustodyContract, Harness, entry_of, settlement_of
from tests.contract.folder_producer import Folder, FolderProducer
from tests.unit.runs.steps import Run, Sums

ONCE = FolderProducer(path="/replaced", retry=RetryPolicy(max_attempts=1))


class Numbers(Broadway):
    """Multiples of 7 fail, and are dead-lettered."""

    producer: Any = ONCE
    processors = Processors(concurrency=1)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("seven") if int(message.data) % 7 == 0 else message


class FolderSums(Sums):
    """The same as tasks, with batches."""

    producer: Any = ONCE


class FolderHarness(Harness):
    def producer(self) -> FolderProducer:
        return FolderProducer(path=self.arguments[0], lease=self.lease)

    def send(self, bodies: Sequence[bytes]) -> None:
        Folder(self.arguments[0]).send(bodies, self.clock.now())


class TestFolder(CustodyContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> FolderHarness:
        return FolderHarness(str(tmp_path / "queue"))


def depth(folder: Folder) -> tuple[int, ...]:
    counts = FolderProducer(path=str(folder.path)).depth(ProducerEnv())
    assert counts is not None
    return counts[:4]


def test_pipeline_runs_in_one_process(tmp_path):
    folder = Folder(str(tmp_path / "queue"))
    folder.send([b"%d" % number for number in range(1, 41)], datetime.now(UTC))

    report = Numbers(producer={"path": str(folder.path)}).run_local(max_messages=30)

    assert (report.settled.acked, report.settled.dead_lettered) == (26, 4)
    assert depth(folder) == (10, 0, 0, 4)


def test_pipeline_runs_as_dag_tasks(tmp_path):
    # Given the steps of a run, each with its own client
    run = Run(tmp_path, pipeline=FolderSums, create=False)
    folder = Folder(str(tmp_path / "queue.db"))
    folder.send([b"%d" % number for number in range(1, 41)], datetime.now(UTC))

    reference = run.process(max_messages=30)
    assert depth(folder) == (10, 0, 30, 0)
    run.batch(reference)
    report = run.ack()

    assert report["balanced"]
    assert report["totals"]["acked"] == 20
    assert report["totals"]["dead_lettered"] == 10  # four by seven, six by five
    assert depth(folder) == (10, 0, 0, 10)


def test_kill_during_immediate_settlement_loses_nothing(tmp_path):
    # Given a settlement killed between the note of a failure and the release
    harness = FolderHarness(str(tmp_path))
    harness.send([b"a", b"b"])
    source = harness.producer().source(harness.env("g1"))
    messages = source.secure(source.receive(2, timeout=0.0))
    lease, custodian = source.lease, harness.producer().custodian(harness.env("g1"))
    retry = Verdict(Action.RETRY, 0.0, "again", "process")
    killed = mock.patch.object(Folder, "hide", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):
        custodian.settle_now(lease, [entry_of(messages[0], retry)])

    # When another process settles the other messages
    settlement = replace(settlement_of(messages[1:]), settled_now=SettleReport())
    report = harness.producer().custodian(harness.env("g2")).settle(lease, settlement)

    # Then the message is released, with its recorded failure
    assert report == SettleReport(acked=1, released=1)
    [again] = harness.producer().source(harness.env("g3")).receive(2, timeout=0.0)
    assert (again.data, again.attempt, again.redelivered) == (messages[0].data, 2, True)
