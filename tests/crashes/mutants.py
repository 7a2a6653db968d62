"""Code that is broken on purpose, and the case that finds it.

``python -m tests.crashes.mutants NAME`` prints what the case's account says, whole and broken.  A
campaign that did not find a guard that is gone could find nothing.
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
from airflow_broadway.testing.crashes.points import Fault, Strike
from tests.crashes.campaigns import MESSAGES, in_memory, made
from tests.crashes.pipelines import PIPELINES
from tests.crashes.subjects import SUBJECTS


def a_message_that_comes_again_does_not_say_so() -> None:
    from airflow_broadway.producers.sqlite.queue import SqliteQueue

    kept: Any = SqliteQueue.receive

    def receive(queue: Any, *given: Any, **options: Any) -> Any:
        messages = kept(queue, *given, **options)
        for message in messages:
            object.__setattr__(message, "redelivered", False)
        return messages

    mutant: Any = SqliteQueue
    mutant.receive = receive


def what_has_no_outcome_is_acknowledged() -> None:
    from airflow_broadway.core.custody.verdicts import ACK
    from airflow_broadway.staging.settling import settlement

    mutant: Any = settlement
    mutant.RELEASE = ACK


def a_message_is_acknowledged_when_it_is_received() -> None:
    from airflow_broadway.core.custody.protocol import Settlement
    from airflow_broadway.core.custody.verdicts import ACK
    from airflow_broadway.runs.process import Process

    kept: Any = Process._publish

    def publish(process: Any, *given: Any) -> Any:
        manifest = kept(process, *given)
        custodian = process.pipeline.producer.custodian(process.env)
        lease = process.staged.lease(manifest.generation)
        custodian.settle(lease, Settlement(rest=ACK, expected=manifest.received))
        return manifest

    mutant: Any = Process
    mutant._publish = publish


def a_message_is_removed_before_its_dead_letter_is_sent() -> None:
    from airflow_broadway.producers.engine.settlement import EngineSettlement

    kept: Any = EngineSettlement._send_letters

    def send(settlement: Any, verdicts: Any) -> Any:
        settlement._remove(verdicts)
        return kept(settlement, verdicts)

    mutant: Any = EngineSettlement
    mutant._send_letters = send


def a_letter_is_deleted_before_its_message_is_back() -> None:
    from airflow_broadway.producers.engine.letters import EngineDeadLetters

    kept: Any = EngineDeadLetters._send_back

    def sent(letters: Any, chosen: Any, moving: Any) -> Any:
        letters.dead.remove([received.receipt for _, received in chosen])
        return kept(letters, chosen, moving)

    mutant: Any = EngineDeadLetters
    mutant._send_back = sent


def a_backfill_does_not_empty_its_sink() -> None:
    from airflow_broadway.runs import process

    mutant: Any = process
    mutant.prepare_sink = lambda run, pipeline, env: None


def a_commit_is_ruled_out_without_a_tombstone() -> None:
    from airflow_broadway.sinks import delta

    mutant: Any = delta._Client
    mutant.rule_out = mutant.landed


class Mutant(NamedTuple):
    """A guard that is gone, and the case that must find it.

    :param found: How a line of the account begins.
    :param broker: Over which it is gone; see :mod:`tests.crashes.subjects`.
    """

    breaks: Callable[[], None]
    execution: str
    kind: str
    what: Fault
    recovery: Recovery
    found: str
    broker: str = "sqlite"
    pipeline: str = "batches"


MUTANTS: dict[str, Mutant] = {
    mutant.breaks.__name__: mutant
    for mutant in (
        Mutant(
            a_message_that_comes_again_does_not_say_so,
            "one/batch.default/1",
            "handle_batch",
            Fault.KILLED_AFTER,
            Recovery.NEXT_RUN,
            "repeated without a mark",
        ),
        Mutant(
            what_has_no_outcome_is_acknowledged,
            "one/process/1",
            "return",
            Fault.KILLED_BEFORE,
            Recovery.NEXT_RUN,
            "lost",
        ),
        Mutant(
            a_message_is_acknowledged_when_it_is_received,
            "one/batch.default/1",
            "handle_batch",
            Fault.KILLED_BEFORE,
            Recovery.NEXT_RUN,
            "lost",
        ),
        Mutant(
            a_message_is_removed_before_its_dead_letter_is_sent,
            "one/ack/1",
            "SendMessageBatch",
            Fault.KILLED_BEFORE,
            Recovery.LAPSE,
            "lost",
            broker="sqs",
            pipeline="two batchers",  # it tries once
        ),
        Mutant(
            a_letter_is_deleted_before_its_message_is_back,
            "one/process/1",
            "SendMessageBatch",
            Fault.KILLED_BEFORE,
            Recovery.NEXT_RUN,
            "lost",
            broker="sqs letters",
        ),
        Mutant(
            a_backfill_does_not_empty_its_sink,
            "one/batch.default/1",
            "handle_batch",
            Fault.KILLED_AFTER,
            Recovery.NEXT_RUN,
            "repeated in the sink",
            broker="sqlite backfill",
            pipeline="refills",
        ),
        Mutant(
            a_commit_is_ruled_out_without_a_tombstone,
            "one/batch.default/1",
            "append",
            Fault.ASLEEP_BEFORE,
            Recovery.NEXT_RUN,
            "repeated in the sink",
            pipeline="commits to delta",
        ),
    )
}


def main(name: str) -> None:
    """Breaks the code, strikes it once, and prints the account."""
    mutant = MUTANTS[name]
    with tempfile.TemporaryDirectory(dir=in_memory()) as folder, SUBJECTS[mutant.broker]() as make:
        make_subject = partial(made, make, PIPELINES[mutant.pipeline])
        campaign = Campaign(make_subject, MESSAGES, Path(folder))
        alone, _ = campaign.baseline().points
        point = next(
            point
            for point in alone
            if point.execution == mutant.execution and point.call.kind == mutant.kind
        )
        case = Case((Strike(point, mutant.what),), mutant.recovery)
        whole = campaign.run(case).account.lines
        mutant.breaks()
        broken = campaign.run(case).account.lines
        print(json.dumps([whole, broken]))


if __name__ == "__main__":
    main(sys.argv[1])
