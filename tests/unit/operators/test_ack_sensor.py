"""What the ack sensor knows while the Dag is parsed, and what it asks Airflow for."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup

from airflow_broadway.core.broadway import Broadway
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.message import Message
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.sensors.ack import BroadwayAckSensor


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", path="/nowhere/orders.db", lease=40.0)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


def sensor(**given: Any) -> BroadwayAckSensor:
    with DAG("orders", schedule=None):
        return BroadwayAckSensor(
            **{"task_id": "ack", "pipeline": Orders, "watch": ["process"], **given}
        )


def test_it_looks_four_times_within_a_lease_and_at_least_every_15_seconds() -> None:
    assert sensor().poke_interval == 10.0
    assert sensor(pipeline=Orders(producer={"lease": 3600.0})).poke_interval == 15.0


def test_a_lease_that_is_a_template_is_no_bound() -> None:
    assert sensor(pipeline=Orders(producer={"lease": "{{ var.value.x }}"})).poke_interval == 15.0


def test_an_interval_too_long_to_renew_the_lease_is_refused() -> None:
    with pytest.raises(OptionsError, match=r"at most half of the producer's lease \(40 s"):
        sensor(poke_interval=21.0)


@pytest.mark.parametrize("given", [{"watch": "process"}, {"watch": []}, {"hold_failed": -1.0}])
def test_nonsense_is_refused_while_the_dag_is_parsed(given: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        sensor(**given)


def test_a_number_of_producers_cannot_be_a_template() -> None:
    with pytest.raises(OptionsError, match=r"producer\.concurrency.*not a template"):
        Orders(producer={"concurrency": "{{ var.value.many }}"}).dag("orders")


def test_a_template_lease_of_a_broker_that_cannot_renew_is_no_error_yet() -> None:
    class Fixed(SqliteProducer):
        renews = False

    class FixedOrders(Orders):
        producer = Fixed(queue="orders", path="/nowhere/orders.db")

    from airflow_broadway.task_group import _check_lease

    pipeline = FixedOrders(producer={"lease": "{{ var.value.x }}"})
    with DAG("orders", schedule=None):
        _check_lease(pipeline, TaskGroup("broadway"), {})
