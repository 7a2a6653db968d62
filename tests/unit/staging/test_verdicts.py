"""One verdict for one message: from its batch, or at settlement from its row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from airflow_broadway.core.custody.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.verdicts import Action, Facts, Verdict
from airflow_broadway.core.model.acks import AckRef, Scope
from airflow_broadway.core.model.message import Message
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
#: Attempt, and the broker's redelivered flag.
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
    [(producer, action) for producer in PRODUCERS for action in producer.actions],
    ids=lambda case: case if isinstance(case, str) else case.kind,
)
def test_success_verdict_is_the_same_from_batch_and_row(tmp_path, producer, action, own):
    # Given messages of all standings whose success is to be settled by an action
    if not own:
        producer = dataclasses.replace(producer, on_success=action)
    fields: Any = {"batcher": "b", "delivery": Delivery(on_success=action if own else None)}
    messages = [
        message(number, attempt=attempt, redelivered=redelivered, **fields)
        for number, (attempt, redelivered) in enumerate(STANDINGS)
    ]

    # When a batch settles them
    kept = Kept()
    acknowledger = RunAcknowledger(producer, kept)
    refs = [AckRef(acknowledger, 0, m.acknowledger.data) for m in messages]
    with Scope("batch"):
        acknowledger.ack(0, [*map(Message.with_acknowledger, messages, refs)], [])

    # And when settling reads what is staged of them
    run, pipeline = open_run(tmp_path), pipeline_of(producer, b=Batcher(batch_size=100))
    generation = publish(run, pipeline, [messages])
    plan = plan_batches(run, pipeline, "b", [generation], try_label="1")
    [batch] = batches_of(run, plan)
    record_outcome(run, plan, batch)
    settlement, complete, _ = build_settlement(run, generation, pipeline, [plan], final=True)
    assert complete
    staged = {entry.message_id: entry.verdict for entry in settlement.entries()}

    # Then both verdicts are the same
    settled = {m.message_id: staged.get(m.message_id, settlement.rest) for m in messages}
    assert settled == kept.verdicts
    # And a second iteration yields the same
    assert {entry.message_id: entry.verdict for entry in settlement.entries()} == staged


@pytest.mark.parametrize("stage", ["process", "batch"])
@pytest.mark.parametrize("producer", PRODUCERS, ids=lambda producer: str(producer.kind))
def test_failure_gets_the_verdict_of_its_facts(producer, stage):
    for action in producer.actions:
        for attempt, redelivered in STANDINGS:
            failed = message(
                1, attempt=attempt, redelivered=redelivered, delivery=Delivery(on_failure=action)
            ).failed("why")
            facts = Facts(action, attempt, redelivered, "why", stage, failed.message_id)
            assert producer.verdict(failed, failed=True, stage=stage) == producer.judge(facts)


def test_unhandled_prefetched_message_is_requeued_at_its_first_failure():
    # Given messages that nobody has handled; the broker says "redelivered" all the same
    producer = RabbitMQProducer(queue="q", on_failure="reject_and_requeue_once")
    first = message(1, redelivered=True).failed("why")
    second = message(1, redelivered=True, attempt=2).failed("why")

    verdicts = [producer.verdict(m, failed=True, stage="process") for m in (first, second)]

    assert [verdict.action for verdict in verdicts] == [Action.RETRY, Action.DEAD_LETTER]
