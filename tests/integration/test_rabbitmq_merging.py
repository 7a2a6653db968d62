"""``merge_options`` at a real broker: merged options apply from receiving to settling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from airflow_broadway import Broadway
from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import OptionsError, ProducerError, ProducerUnavailable
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.testing.contract import settlement_of
from tests.rabbitmq_place import Place

pytestmark = pytest.mark.broker


def declare_shards(place: Place, count: int = 2) -> list[str]:
    """Declares queues with two messages in each; returns their names."""
    names = [f"{place.name}-{index}" for index in range(count)]
    with place.channel() as channel:
        channel.confirm_delivery()
        for name in names:
            channel.queue_declare(name, durable=True)
            for number in range(2):
                channel.basic_publish("", name, f"{name} {number}".encode())
    return names


def receive(place: Place, producer: RabbitMQProducer, index: int) -> tuple[list[Message], Lease]:
    env = dataclasses.replace(place.env(f"g{index}"), index=index)
    source = producer.source(env)
    try:
        return place.take(source), Lease.from_json(source.lease.to_json())
    finally:
        source.close()


def test_sharded_queues_are_settled_by_their_own_options(undeclared):
    # Given two producers, each with its own queue and its own dead-letter queue
    names = declare_shards(undeclared)
    dead_queues = [f"{name}-dead" for name in names]
    with undeclared.channel() as channel:
        for queue in dead_queues:
            channel.queue_declare(queue, durable=True)

    def merge(index: int) -> Mapping[str, Any]:
        return {
            "queue": names[index],
            "dead_letter": dead_queues[index],
            "metadata": ["routing_key"] if index else [],
            "on_failure": "reject" if index else "retry",
            "lease": 600.0 + index,
        }

    producer = undeclared.producer(concurrency=2, merge_options=merge, queue="nobody's")
    received = [receive(undeclared, producer, index) for index in range(2)]

    # When another process settles the messages without the producers' index
    custodian = producer.custodian(undeclared.env("custodian"))
    for index, (messages, lease) in enumerate(received):
        assert [m.data for m in messages] == [f"{names[index]} {n}".encode() for n in range(2)]
        assert messages[0].metadata == ({"routing_key": names[1]} if index else {})
        assert (lease.seconds, lease.state["queue"]) == (600.0 + index, names[index])
        assert custodian.renew(lease) is not None
        assert custodian.holds(lease)
        failed = {
            m.message_id: producer.verdict(m.failed("why"), failed=True, stage="process")
            for m in messages
        }
        report = custodian.settle(lease, settlement_of(messages, failed))
        assert report == (SettleReport(dead_lettered=2) if index else SettleReport(requeued=2))
    custodian.close()

    # Then each message is settled by its own producer's options
    assert [undeclared.depth(queue) for queue in dead_queues] == [0, 2]
    assert producer.depth(undeclared.env()).ready == 0
    assert producer.depth(undeclared.env()).delayed == 2
    assert producer.depth(undeclared.env()).dead == 2


def test_a_merged_address_replaces_the_declared_one(undeclared):
    [name] = declare_shards(undeclared, 1)
    unreachable = undeclared.producer(
        queue=name, reconnect_timeout=0.1, merge_options=lambda index: {"uri": "amqp://127.0.0.1:1"}
    )
    declared = RabbitMQProducer(
        queue=name,
        conn_id="not_defined",
        merge_options=lambda index: {"uri": undeclared.server.uri},
    )

    with pytest.raises(ProducerUnavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
        unreachable.source(undeclared.env())
    assert len(receive(undeclared, declared, 0)[0]) == 2


def test_a_pipeline_settles_by_the_merged_actions(undeclared):
    [name] = declare_shards(undeclared, 1)

    class Sharded(Broadway):
        producer = undeclared.producer(
            queue="nobody's",
            on_failure="retry",
            merge_options=lambda index: {"queue": name, "on_failure": "dead_letter"},
        )

        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            raise ValueError("never")

    report = Sharded().run_local(max_messages=10)

    assert report.settled.dead_lettered == 2
    assert undeclared.depth(f"broadway.dead.{name}") == 2


def test_a_lease_of_a_removed_shard_is_not_settled_elsewhere(undeclared):
    names = declare_shards(undeclared)
    before = undeclared.producer(merge_options=lambda index: {"queue": names[0]})
    after = undeclared.producer(merge_options=lambda index: {"queue": names[1]})
    _, lease = receive(undeclared, before, 0)

    custodian = after.custodian(undeclared.env("custodian"))
    with pytest.raises(ProducerError, match="give both halves of the run the same options"):
        custodian.settle(lease, Settlement(rest=settlement_of([]).rest))
    custodian.close()


@pytest.mark.parametrize("name", ["concurrency", "retry", "rate_limiting", "transformer"])
def test_pipeline_wide_options_cannot_be_merged(name):
    producer = RabbitMQProducer(queue="q", merge_options=lambda index: {name: None})

    with pytest.raises(OptionsError, match=rf"merge_options\.{name}.* for all producers"):
        producer.merged(0)
