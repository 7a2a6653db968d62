"""Of which generation and batch the lines of a run's tasks speak."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import structlog
from airflow.sdk._shared.logging.structlog import structlog_processors

from airflow_broadway.core.errors import LeaseLapsed
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.python_batches import _BatchSink
from airflow_broadway.runs.tasks import ProcessTask
from tests.unit.logged import logged
from tests.unit.runs.steps import Run, Sums, precede

log = logging.getLogger("user")


def processed(run: Run) -> dict[str, Any]:
    task = ProcessTask(run.staged, run.pipeline, run.task(), run.ports, budget=Budget())
    return task.run().reference


def test_airflow_adds_context_variables_to_log_lines():
    shared, *_ = structlog_processors(json_output=True)
    assert structlog.contextvars.merge_contextvars in shared


def test_log_lines_name_message_batch_and_generation(tmp_path, monkeypatch):
    def one(self, processor, message, context):
        log.info("message %s", message.message_id)

    def several(self, batcher, messages, info, context):
        log.info("batch %s", info.batch_id)

    precede(monkeypatch, one, Sums, "handle_message")
    precede(monkeypatch, several, Sums, "handle_batch")
    run = Run(tmp_path, numbers=[1, 2, 3])

    with logged(run_id="manual__1") as lines:
        reference = processed(run)
        (received,) = lines.of("Received 3 messages")
        run.batch(reference)
        run.ack()

    task = {"run_id": "manual__1"}
    generation = {**task, "generation": reference["generation"]}
    assert received == generation
    handled = [(line, ids) for line, ids in lines.records if line.startswith("message ")]
    assert len(handled) == 3
    for line, ids in handled:
        assert ids == {**generation, "message_id": line.removeprefix("message ")}
    ((line, ids),) = [(line, ids) for line, ids in lines.records if line.startswith("batch ")]
    assert ids == {**task, "batcher": "default", "batch_id": line.removeprefix("batch ")}
    # And where it is settled
    assert lines.of("Settled generation") == [generation]
    [settled] = [line for line, _ in lines.records if line.startswith("Settled generation")]
    assert settled.endswith("of process[0].  Settled 3 messages: 3 acked.")


def test_swept_generation_is_named(tmp_path):
    dead = Run(tmp_path, "manual__0")
    dead.send([1])
    reference = processed(dead)

    with logged(run_id="manual__1") as lines:
        processed(Run(tmp_path, "manual__1", finished=["manual__0"]))

    dead_one = {"run_id": "manual__1", "generation": reference["generation"]}
    assert lines.of("Settled the dead generation") == [dead_one]


def test_lapsed_batch_is_named(tmp_path, monkeypatch):
    run = Run(tmp_path, numbers=[1])
    reference = processed(run)

    monkeypatch.setattr(_BatchSink, "handle", mock.Mock(side_effect=LeaseLapsed("it lapsed")))
    with logged(run_id="manual__1") as lines:
        run.batch(reference)

    ((line, ids),) = [line for line in lines.records if "it lapsed" in line[0]]
    assert line == f"Batch {ids['batch_id']}: it lapsed."
    assert ids["batcher"] == "default"
