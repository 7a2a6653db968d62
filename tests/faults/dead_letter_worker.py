"""The worker processes of the requeue case: one creates or drains dead letters, one is killed.

``python -m tests.faults.dead_letter_worker BROKER FOLDER refuse|handle`` drains the queue:
``refuse`` dead-letters the messages, ``handle`` records them in ``handled.db``.

``python -m tests.faults.dead_letter_worker BROKER FOLDER requeue`` prints ``ready`` and runs
``airflow-broadway dead-letters requeue --all``.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.local.run import LocalRun
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.pubsub.dead_letters import PubSubDeadLetters
from airflow_broadway.producers.sqs.dead_letters import SqsDeadLetters
from tests.faults.dags.killed_pipeline import PIPELINES, BatchInput, Killed, record_inputs

READY = "ready"
HANDLED = "handled.db"
#: Seconds for which SQS and Pub/Sub hide dead letters that a killed command had received.
_HIDDEN = 5


class RequeuePipeline(Broadway):
    """Handles every message, or dead-letters every message (``context["refuse"]``)."""

    producer: Any = Killed.producer
    processors = Processors(concurrency=1, max_demand=500)
    batchers = {"default": Batcher(engine="python", batch_size=500, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if context["refuse"]:
            return message.configure_ack(on_failure="dead_letter").failed("not fixed yet")
        return message.put_data(int(message.data))

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        handled = (
            BatchInput.from_message(message, message.data, batch_info) for message in messages
        )
        record_inputs(context["handled"], handled)
        return messages


def drain(broker: str, folder: Path, *, refuse: bool) -> None:
    """Drains the queue until two consecutive runs receive nothing."""
    original = PIPELINES[broker]
    context = {"refuse": refuse, "handled": str(folder / HANDLED)}
    pipeline = RequeuePipeline(context=context)
    pipeline.producer = original.producer
    empty_runs = 0
    while empty_runs < 2:
        report = LocalRun(pipeline, _env(broker, folder)).pull(
            Budget(idle_seconds=1.0, wait_seconds=1.0)
        )
        empty_runs = 0 if report.received else empty_runs + 1


def _env(broker: str, folder: Path) -> ProducerEnv:
    from airflow_broadway.adapters.connections import AirflowConnections  # it loads Airflow

    name = PIPELINES[broker].__name__
    return ProducerEnv(
        pipeline=name,
        generation=uuid.uuid4().hex,
        owner={"dag_id": "letters", "run_id": "letters"},
        connections=AirflowConnections(),
        staging=f"file://{folder / 'staging'}/{name}",
        shared=f"file://{folder / 'staging'}/.shared",
    )


def requeue(broker: str, folder: Path) -> int:
    """Requeues all dead letters; returns the command's exit code."""
    from airflow_broadway.cli.app import main as command  # it loads Airflow

    SqsDeadLetters.hidden_seconds = _HIDDEN
    PubSubDeadLetters.hidden_seconds = 2 * _HIDDEN
    original = PIPELINES[broker]
    producer: Any = original.producer
    # Imports and connects before READY, so that the kills hit the requeue itself.
    producer.dead_letters(_env(broker, folder)).close()
    print(READY, flush=True)
    pipeline = ["--pipeline", f"{original.__module__}:{original.__name__}"]
    staging = ["--staging", f"file://{folder / 'staging'}"]
    return command(["dead-letters", "requeue", "--all", "--json", *pipeline, *staging])


def main() -> int:
    broker, path, action = sys.argv[1:]
    folder = Path(path)
    if action == "requeue":
        return requeue(broker, folder)
    drain(broker, folder, refuse=action == "refuse")
    return 0


if __name__ == "__main__":
    sys.exit(main())
