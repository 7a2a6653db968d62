"""A process of its own for dead letters: one that makes or drains them, and one that is killed.

``python -m tests.faults.letters_worker BROKER FOLDER refuse|handle`` takes all that waits, in one
run after another: ``refuse`` makes dead letters of it, ``handle`` notes it in ``handled.db``.

``python -m tests.faults.letters_worker BROKER FOLDER requeue`` is the command ``airflow-broadway
dead-letters requeue --all``, which says first that it begins.
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
from tests.faults.dags.killed_pipeline import PIPELINES, Handled, Killed, note

AT_WORK = "at work"
HANDLED = "handled.db"
#: Seconds for which SQS and Pub/Sub hide letters that a killed process had received; by default
#: minutes.
_HIDDEN = 5


class Letters(Broadway):
    """Handles each message, or none."""

    producer: Any = Killed.producer
    processors = Processors(concurrency=1, max_demand=500)
    batchers = {"default": Batcher(engine="python", batch_size=500, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if context["refuse"]:
            return message.configure_ack(on_failure="dead_letter").failed("not mended yet")
        return message.put_data(int(message.data))

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        handled = (Handled.of(message, message.data, batch_info) for message in messages)
        note(context["handled"], handled)
        return messages


def take(broker: str, folder: Path, *, refuse: bool) -> None:
    """Takes all that waits, until two runs in a row find nothing."""
    own = PIPELINES[broker]
    context = {"refuse": refuse, "handled": str(folder / HANDLED)}
    pipeline = Letters(context=context)
    pipeline.producer = own.producer
    quiet = 0
    while quiet < 2:
        report = LocalRun(pipeline, _env(broker, folder)).pull(
            Budget(idle_seconds=1.0, wait_seconds=1.0)
        )
        quiet = 0 if report.received else quiet + 1


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
    """Sends all of them back; the command's own exit code."""
    from airflow_broadway.cli.app import main as command  # it loads Airflow

    SqsDeadLetters.hidden_seconds = _HIDDEN
    PubSubDeadLetters.hidden_seconds = 2 * _HIDDEN
    own = PIPELINES[broker]
    producer: Any = own.producer
    # The slow part that moves nothing comes first: it is not to be killed.
    producer.dead_letters(_env(broker, folder)).close()
    print(AT_WORK, flush=True)
    place = ["--pipeline", f"{own.__module__}:{own.__name__}"]
    where = ["--staging", f"file://{folder / 'staging'}"]
    return command(["dead-letters", "requeue", "--all", "--json", *place, *where])


def main() -> int:
    broker, place, what = sys.argv[1:]
    folder = Path(place)
    if what == "requeue":
        return requeue(broker, folder)
    take(broker, folder, refuse=what == "refuse")
    return 0


if __name__ == "__main__":
    sys.exit(main())
