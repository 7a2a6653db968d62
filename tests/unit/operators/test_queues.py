"""Queues for ``MessageQueueTrigger``, and queues and tables as assets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from airflow.exceptions import AirflowProviderDeprecationWarning
from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.providers.openlineage.utils.utils import translate_airflow_asset
from airflow.sdk import Asset

from airflow_broadway.adapters.assets import create_asset
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.producers import (
    KafkaProducer,
    PubSubProducer,
    RabbitMQProducer,
    SqliteProducer,
    SqliteQueue,
    SqsProducer,
)
from airflow_broadway.runs.backlog.crossings import Runs
from airflow_broadway.sinks import IcebergTable, PostgresTable
from airflow_broadway.triggers.backlog import BroadwayBacklogTrigger


def stored(trigger: Any) -> dict[str, Any]:
    """Recreates a trigger as the triggerer does, from its stored form."""
    path, kwargs = trigger.serialize()
    assert path == "airflow_broadway.triggers.backlog.BroadwayBacklogTrigger"
    loaded: dict[str, Any] = json.loads(json.dumps(kwargs))
    return loaded


def test_message_of_an_embedded_queue_is_reported_and_left_there(tmp_path, monkeypatch):
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    connection = {"conn_type": "broadway_sqlite", "host": str(tmp_path / "queue.db")}
    monkeypatch.setenv("AIRFLOW_CONN_ORDERS_QUEUE", json.dumps(connection))
    monkeypatch.setattr("airflow_broadway.triggers.backlog.count_runs", lambda _: Runs(0, 0))
    kwargs = stored(
        MessageQueueTrigger(
            scheme="broadway+sqlite", queue_name="orders", conn_id="orders_queue", dag_id="drain"
        )
    )

    async def first() -> Any:
        return await asyncio.wait_for(anext(BroadwayBacklogTrigger(**kwargs).run()), 30)

    with SqliteQueue(tmp_path / "queue.db", "orders") as queue:
        queue.send([b"1"])
        event: dict[str, Any] = asyncio.run(first()).payload
        assert (event["pipeline"], event["ready"]) == ("orders", 1)
        assert queue.depth()[:4] == (1, 0, 0, 0)


@pytest.mark.parametrize("scheme", ["broadway+rabbitmq", "broadway+sqlite"])
def test_uri_and_scheme_describe_the_same_queue(scheme):
    with pytest.warns(AirflowProviderDeprecationWarning):
        by_uri = MessageQueueTrigger(
            queue=f"{scheme}://some_conn/a%2Fb", dag_id="drain", max_age=None, min_messages=7
        )
    by_scheme = MessageQueueTrigger(
        scheme=scheme, queue_name="a/b", conn_id="some_conn", dag_id="drain", min_messages=7
    )

    assert stored(by_uri) == stored(by_scheme)
    assert stored(by_uri)["min_messages"] == 7
    [queue] = json.loads(stored(by_uri)["queues"])["queues"]
    assert queue["options"]["queue"] == "a/b"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"min_messages": 0}, OptionsError),
        ({"max_age": 60.0}, OptionsError),  # RabbitMQ reports no age
        ({"no_option": 1}, OptionsError),
    ],
)
def test_option_of_a_queue_that_breaks_its_rule_is_refused(options, error):
    trigger: Any = MessageQueueTrigger(
        scheme="broadway+rabbitmq", queue_name="orders", dag_id="drain", **options
    )
    with pytest.raises(error):
        trigger.serialize()


@pytest.mark.parametrize("uri", ["broadway+rabbitmq://conn", "broadway+sqlite:///orders"])
def test_uri_without_connection_or_queue_is_refused(uri):
    with pytest.raises(ValueError, match="lacks a part"):
        Asset(uri)


QUEUE = create_asset(scheme="broadway+rabbitmq", conn_id="rabbit", queue="eu/orders").uri


@pytest.mark.parametrize(
    ("uri", "dataset"),
    [
        (QUEUE, ("amqp://broker:5673", "shop/eu/orders")),
        ("broadway+sqlite://sqlite/orders", ("file", "/data/q.db/orders")),
        (PostgresTable(conn_id="pg", table="a.b").uri, ("postgres://db:5432", "shop.a.b")),
        (IcebergTable(catalog="lake", table="a.b").uri, ("iceberg://lake", "a.b")),
    ],
)
def test_asset_is_a_dataset_of_openlineage(uri, dataset, monkeypatch):
    for name, connection in {
        "RABBIT": {"conn_type": "rabbitmq", "host": "broker", "port": 5673, "schema": "shop"},
        "SQLITE": {"conn_type": "broadway_sqlite", "host": "/data/q.db"},
        "PG": {"conn_type": "postgres", "host": "db", "schema": "shop", "password": "secret"},
    }.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", json.dumps(connection))

    translated: Any = translate_airflow_asset(Asset(uri), None)

    assert (translated.namespace, translated.name) == dataset


@pytest.mark.parametrize(
    ("producer", "datasets"),
    [
        (
            KafkaProducer(
                topics=["a", "b"], group_id="g", hosts=["k1:9092", "k2:9092"], conn_id=None
            ),
            [("kafka://k1:9092", "a"), ("kafka://k1:9092", "b")],
        ),
        (
            SqsProducer(queue_url="https://sqs.eu-west-1.amazonaws.com/123456789012/orders"),
            [("sqs://sqs.eu-west-1.amazonaws.com", "123456789012/orders")],
        ),
        (SqsProducer(queue_name="orders"), [("sqs", "orders")]),
        (PubSubProducer(subscription="orders"), [("pubsub", "subscription:orders")]),
        (
            PubSubProducer(subscription="orders", project_id="shop"),
            [("pubsub", "subscription:shop:orders")],
        ),
        (
            RabbitMQProducer(queue="orders", uri="amqp://host", on_failure="retry"),
            [("amqp://host:5672", "orders")],
        ),
        (SqliteProducer(queue="orders", path="/data/q.db"), [("file", "/data/q.db/orders")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_queues_of_a_producer_are_datasets_by_the_names_of_openlineage(producer, datasets):
    assert list(producer.datasets(ProducerEnv())) == datasets
