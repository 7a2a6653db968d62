"""Of which generation and batch the lines of a run's tasks speak."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import structlog
from airflow.sdk._shared.logging.structlog import structlog_processors

from airflow_broadway import BatchInfo, Message
from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.tasks import ProcessTask
from airflow_broadway.staging.batch_reader import BatchReader
from tests.unit.logged import logged
from tests.unit.runs.steps import Run, Sums, precede

log = logging.getLogger("user")


def processed(run: Run) -> dict[str, Any]:
    task = ProcessTask(run.staged, run.pipeline, run.task(), run.ports, budget=Budget())
    return task.run().reference


def test_airflow_adds_to_each_line_what_stands_in_such_variables() -> None:
    shared, *_ = structlog_processors(json_output=True)
    assert structlog.contextvars.merge_contextvars in shared


def test_each_task_names_what_it_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(self: Sums, processor: str, message: Message, context: Any) -> None:
        log.info("message %s", message.message_id)

    def several(self: Sums, batcher: str, messages: Any, info: BatchInfo, context: Any) -> None:
        log.info("batch %s", info.batch_id)

    precede(monkeypatch, one, Sums, "handle_message")
    precede(monkeypatch, several, Sums, "handle_batch")
    run = Run(tmp_path)
    run.send([1, 2, 3])

    with logged(run_id="manual__1") as lines:
        reference = processed(run)
        (received,) = lines.of("Received 3 messages")
        run.batch(reference)
        run.ack()

    task = {"run_id": "manual__1"}
    generation = {**task, "generation": reference["generation"]}
    assert received == generation
    handled = [(line, ids) for line, ids in lines.kept if line.startswith("message ")]
    assert len(handled) == 3
    for line, ids in handled:
        assert ids == {**generation, "message_id": line.removeprefix("message ")}
    ((line, ids),) = [(line, ids) for line, ids in lines.kept if line.startswith("batch ")]
    assert ids == {**task, "batcher": "default", "batch_id": line.removeprefix("batch ")}
    # And where it is settled
    assert lines.of("Settled generation") == [generation]


def test_a_dead_generation_is_named_where_it_is_given_back(tmp_path: Path) -> None:
    dead = Run(tmp_path, "manual__0")
    dead.send([1])
    reference = processed(dead)

    with logged(run_id="manual__1") as lines:
        processed(Run(tmp_path, "manual__1", finished=["manual__0"]))

    dead_one = {"run_id": "manual__1", "generation": reference["generation"]}
    assert lines.of("Settled the dead generation") == [dead_one]


def test_a_batch_that_is_no_longer_held_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.send([1])
    reference = processed(run)

    def lapsed(self: BatchReader, *_: Any) -> None:
        raise LeaseLapsed("it lapsed")

    monkeypatch.setattr(BatchReader, "read", lapsed)
    with logged(run_id="manual__1") as lines:
        run.batch(reference)

    ((line, ids),) = [each for each in lines.kept if "it lapsed" in each[0]]
    assert line == f"Batch {ids['batch_id']}: it lapsed."
    assert ids["batcher"] == "default"
