from __future__ import annotations

from datetime import timedelta

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.broker.holding_queues import QueueNames
from airflow_broadway.testing import ManualClock


def test_renewal_does_not_move_lease_bound():
    clock = ManualClock()
    producer = RabbitMQProducer(queue="q", uri="amqp://127.0.0.1:1", lease=600.0)
    custodian = producer.custodian(ProducerEnv(clock=clock))
    lease = Lease(
        kind="rabbitmq",
        generation="g",
        seconds=600.0,
        deadline=clock.now() + timedelta(seconds=600.0),
        state={"queue": "q", "holding_queue": QueueNames("q").held(0), "index": 0},
    )
    clock.advance(599.0)
    assert custodian.renew(lease) == lease
    clock.advance(1.0)
    assert custodian.renew(lease) is None
    assert not producer.renews
