"""Mutants: code without one of its guards, and the case that must detect it.

``python -m tests.crashes.mutants NAME`` prints the violations of the case, without and with the
mutation.  They show that the campaigns can detect violations.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from airflow_broadway.testing.crashes.campaign import Campaign
from airflow_broadway.testing.crashes.case import Case, Recovery
from airflow_broadway.testing.crashes.points import Fault, Injection
from tests.crashes.campaigns import MESSAGES, configure_subject, memory_folder
from tests.crashes.pipelines import PIPELINES
from tests.crashes.subjects import SUBJECTS


def redelivered_messages_are_not_marked() -> None:
    from airflow_broadway.producers.sqlite.queue import SqliteQueue

    original: Any = SqliteQueue.receive

    def receive(queue: Any, *args: Any, **options: Any) -> Any:
        messages = original(queue, *args, **options)
        for message in messages:
            object.__setattr__(message, "redelivered", False)
        return messages

    mutant: Any = SqliteQueue
    mutant.receive = receive


def messages_without_outcome_are_acknowledged() -> None:
    from airflow_broadway.core.custody.verdicts import ACK
    from airflow_broadway.staging.settling import settlement

    mutant: Any = settlement
    mutant.RELEASE = ACK


def messages_are_acknowledged_on_receipt() -> None:
    from airflow_broadway.core.custody.protocol import Settlement
    from airflow_broadway.core.custody.verdicts import ACK
    from airflow_broadway.runs.process import Process

    original: Any = Process._publish

    def publish(process: Any, *args: Any) -> Any:
        manifest = original(process, *args)
        custodian = process.pipeline.producer.custodian(process.env)
        lease = process.staged.lease(manifest.generation)
        custodian.settle(lease, Settlement(rest=ACK, expected=manifest.received))
        return manifest

    mutant: Any = Process
    mutant._publish = publish


def messages_are_removed_before_their_dead_letters_are_sent() -> None:
    from airflow_broadway.producers.engine.settlement import EngineSettlement

    original: Any = EngineSettlement._send_letters

    def send(settlement: Any, verdicts: Any) -> Any:
        settlement._remove(verdicts)
        return original(settlement, verdicts)

    mutant: Any = EngineSettlement
    mutant._send_letters = send


def dead_letters_are_deleted_before_they_are_requeued() -> None:
    from airflow_broadway.producers.engine.letters import EngineDeadLetters

    original: Any = EngineDeadLetters._send_back

    def sent(letters: Any, chosen: Any, moving: Any) -> Any:
        letters.dead.remove([received.receipt for _, received in chosen])
        return original(letters, chosen, moving)

    mutant: Any = EngineDeadLetters
    mutant._send_back = sent


def backfills_do_not_empty_the_sink() -> None:
    from airflow_broadway.runs import process

    mutant: Any = process
    mutant.prepare_sink = lambda run, pipeline, env: None


def commits_are_ruled_out_without_a_tombstone() -> None:
    from airflow_broadway.sinks import delta

    mutant: Any = delta._Client
    mutant.rule_out = mutant.landed


class Mutant(NamedTuple):
    """A mutation, and the case that must detect it.

    :param violation: The beginning of the expected violation.
    :param broker: The subject's name; see :mod:`tests.crashes.subjects`.
    """

    apply: Callable[[], None]
    execution: str
    kind: str
    fault: Fault
    recovery: Recovery
    violation: str
    broker: str = "sqlite"
    pipeline: str = "batches"


MUTANTS: dict[str, Mutant] = {
    mutant.apply.__name__: mutant
    for mutant in (
        Mutant(
            redelivered_messages_are_not_marked,
            "one/batch.default/1",
            "handle_batch",
            Fault.KILLED_AFTER,
            Recovery.NEXT_RUN,
            "repeated without a mark",
        ),
        Mutant(
            messages_without_outcome_are_acknowledged,
            "one/process/1",
            "return",
            Fault.KILLED_BEFORE,
            Recovery.NEXT_RUN,
            "lost",
        ),
        Mutant(
            messages_are_acknowledged_on_receipt,
            "one/batch.default/1",
            "handle_batch",
            Fault.KILLED_BEFORE,
            Recovery.NEXT_RUN,
            "lost",
        ),
        Mutant(
            messages_are_removed_before_their_dead_letters_are_sent,
            "one/ack/1",
            "SendMessageBatch",
            Fault.KILLED_BEFORE,
            Recovery.LAPSE,
            "lost",
            broker="sqs",
            pipeline="two batchers",  # one attempt per message
        ),
        Mutant(
            dead_letters_are_deleted_before_they_are_requeued,
            "one/process/1",
            "SendMessageBatch",
            Fault.KILLED_BEFORE,
            Recovery.NEXT_RUN,
            "lost",
            broker="sqs letters",
        ),
        Mutant(
            backfills_do_not_empty_the_sink,
            "one/batch.default/1",
            "handle_batch",
            Fault.KILLED_AFTER,
            Recovery.NEXT_RUN,
            "repeated in the sink",
            broker="sqlite backfill",
            pipeline="refills",
        ),
        Mutant(
            commits_are_ruled_out_without_a_tombstone,
            "one/batch.default/1",
            "append",
            Fault.SUSPENDED_BEFORE,
            Recovery.NEXT_RUN,
            "repeated in the sink",
            pipeline="commits to delta",
        ),
    )
}


def main(name: str) -> None:
    """Runs the case without and with the mutation, and prints the violations."""
    mutant = MUTANTS[name]
    with (
        tempfile.TemporaryDirectory(dir=memory_folder()) as folder,
        SUBJECTS[mutant.broker]() as make,
    ):
        make_subject = partial(configure_subject, make, PIPELINES[mutant.pipeline])
        campaign = Campaign(make_subject, MESSAGES, Path(folder))
        points, _ = campaign.baseline().points
        point = next(
            point
            for point in points
            if point.execution == mutant.execution and point.call.kind == mutant.kind
        )
        case = Case((Injection(point, mutant.fault),), mutant.recovery)
        unchanged = campaign.run(case).account.lines
        mutant.apply()
        mutated = campaign.run(case).account.lines
        print(json.dumps([unchanged, mutated]))


if __name__ == "__main__":
    main(sys.argv[1])
