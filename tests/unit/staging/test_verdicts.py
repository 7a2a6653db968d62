"""One verdict for one message, whoever asks: a batch that has it, or settling by its row."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from airflow_broadway.core.custody.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict
from airflow_broadway.core.model.acks import AckRef, Scope
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.staging.planner import plan_batches
from airflow_broadway.staging.settling.settlement import build_settlement
from tests.unit.staging.kit import (
    batches_of,
    message,
    open_run,
    pipeline_of,
    publish,
    record_outcome,
)

PRODUCERS: list[Producer] = [
    SqliteProducer(queue="q", path="/q.db"),
    SqsProducer(queue_name="q"),
    RabbitMQProducer(queue="q"),
]
#: Attempt, and whether the broker says "redelivered".
STANDINGS = [(1, False), (1, True), (2, False), (2, True), (4, True), (5, True)]


class Kept:
    """Keeps the verdicts of a stage."""

    def __init__(self) -> None:
        self.verdicts: dict[str, Verdict] = {}

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        self.verdicts.update({m.message_id: v for m, v in (*successful, *failed)})

    settle_now = record


@pytest.mark.parametrize("own", [False, True], ids=["producer's", "message's own"])
@pytest.mark.parametrize(
    ("producer", "action"),
    [(each, action) for each in PRODUCERS for action in each.actions],
    ids=lambda each: each if isinstance(each, str) else each.kind,
)
def test_a_success_gets_one_verdict_from_a_batch_and_from_its_staged_row(
    tmp_path: Path, producer: Producer, action: str, own: bool
) -> None:
    # Given messages of all standings whose success is to be settled by an action
    if not own:
        producer = dataclasses.replace(producer, on_success=action)
    given = [
        message(
            number,
            batcher="b",
            attempt=attempt,
            redelivered=redelivered,
            delivery=Delivery(on_success=action if own else None),
        )
        for number, (attempt, redelivered) in enumerate(STANDINGS)
    ]

    # When a batch settles them
    kept = Kept()
    acknowledger = RunAcknowledger(producer, kept)
    held = [
        each.with_acknowledger(AckRef(acknowledger, 0, each.acknowledger.data)) for each in given
    ]
    with Scope("batch"):
        acknowledger.ack(0, held, [])

    # And when settling reads what is staged of them
    run, pipeline = open_run(tmp_path), pipeline_of(producer, b=Batcher(batch_size=100))
    generation = publish(run, pipeline, [given])
    plan = plan_batches(run, pipeline, "b", [generation], try_label="1")
    [batch] = batches_of(run, plan)
    record_outcome(run, plan, batch)
    settlement, complete, _ = build_settlement(run, generation, pipeline, [plan], final=True)
    assert complete
    staged = {entry.message_id: entry.verdict for entry in settlement.entries()}

    # Then both say the same of each
    settled = {each.message_id: staged.get(each.message_id, settlement.rest) for each in given}
    assert settled == kept.verdicts
    # And whoever iterates again is told the same
    assert {entry.message_id: entry.verdict for entry in settlement.entries()} == staged


@pytest.mark.parametrize("stage", ["process", "batch"])
@pytest.mark.parametrize("producer", PRODUCERS, ids=lambda each: str(each.kind))
def test_a_failure_gets_the_verdict_of_its_facts(producer: Producer, stage: str) -> None:
    for action in producer.actions:
        for attempt, redelivered in STANDINGS:
            failed = message(
                1,
                attempt=attempt,
                redelivered=redelivered,
                delivery=Delivery(on_failure=action),
            ).failed("why")
            facts = Facts(action, attempt, redelivered, "why", stage, failed.message_id)
            assert producer.verdict(failed, failed=True, stage=stage) == producer.judge(facts)


def test_what_was_prefetched_and_given_back_unhandled_is_requeued_at_its_first_failure() -> None:
    # Given messages that nobody has handled; the broker says "redelivered" all the same
    producer = RabbitMQProducer(queue="q", on_failure="reject_and_requeue_once")
    first = message(1, redelivered=True).failed("why")
    second = message(1, redelivered=True, attempt=2).failed("why")

    verdicts = [producer.verdict(each, failed=True, stage="process") for each in (first, second)]

    assert [verdict.action for verdict in verdicts] == [Action.RETRY, Action.DEAD_LETTER]
