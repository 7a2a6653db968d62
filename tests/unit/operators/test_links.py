"""Links from tasks in Airflow's UI: their targets, which are web addresses only."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.adapters.links import (
    ALL_TASKS,
    AT_BROKER,
    ON_SPARK,
    ConsoleLink,
    ReportLink,
    RunPageLink,
    SparkLink,
    note_console,
    note_spark,
    web_address,
)
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.get_provider_info import get_provider_info
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.operators.spark_submit import BroadwaySparkSubmitOperator
from airflow_broadway.pipeline import Broadway
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.ports import Ports
from airflow_broadway.sensors.ack import BroadwayAckSensor
from airflow_broadway.submit.hook import SubmitHook
from tests.unit.operators.context import task_context

TI: Any = SimpleNamespace(dag_id="a b", run_id="manual__2026-01-01T00:00:00+00:00")
QUEUE = "https://sqs.{}.amazonaws.com/1/orders"


def pipeline_of(producer: Producer) -> Any:
    class Orders(Broadway):
        def handle_message(self, processor: str, message: Any, context: Any) -> Any:
            return message

    return type("Orders", (Orders,), {"producer": producer, "batchers": {}})()


def console(producer: Producer, connection: Connection | None = None) -> str | None:
    """Where the console link of a task leads."""
    operator = SimpleNamespace()
    connections: Any = SimpleNamespace(get=lambda conn_id: connection)
    note_console(operator, pipeline_of(producer), Ports(connections=connections))
    return ConsoleLink().get_link(operator, ti_key=TI)


def test_each_operator_has_its_links():
    for operator in (BroadwayProcessorOperator, BroadwayRunOperator, BroadwayAckSensor):
        assert operator.operator_extra_links == AT_BROKER
    assert BroadwayBatcherOperator.operator_extra_links == ALL_TASKS
    assert BroadwaySparkSubmitOperator.operator_extra_links == ON_SPARK
    named = {name.rpartition(".")[2] for name in get_provider_info()["extra-links"]}
    assert named == {type(link).__name__ for link in (*AT_BROKER, *ON_SPARK)}


@pytest.mark.parametrize("base", ["", "https://airflow.example.org/team/"])
def test_ids_are_quoted_below_the_airflow_address(monkeypatch, base):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", base)

    page = RunPageLink().get_link(None, ti_key=TI)

    assert page == (
        f"{base.rstrip('/')}/broadway/dags/a%20b/runs/manual__2026-01-01T00%3A00%3A00%2B00%3A00"
    )
    assert ReportLink().get_link(None, ti_key=TI) == f"{page}/report"


@pytest.mark.parametrize(
    ("producer", "address"),
    [
        (
            SqsProducer(queue_url=QUEUE.format("eu-west-1")),
            "https://eu-west-1.console.aws.amazon.com/sqs/v3/home?region=eu-west-1#/queues/"
            "https%3A%2F%2Fsqs.eu-west-1.amazonaws.com%2F1%2Forders",
        ),
        (SqsProducer(queue_url="http://127.0.0.1:5000/1/orders"), None),
        (SqsProducer(queue_name="orders"), None),
        (
            PubSubProducer(subscription="projects/my-shop/subscriptions/orders"),
            "https://console.cloud.google.com/cloudpubsub/subscription/detail/orders"
            "?project=my-shop",
        ),
        (PubSubProducer(subscription="orders"), None),
        (
            PubSubProducer(
                subscription="projects/my-shop/subscriptions/orders",
                endpoint="http://127.0.0.1:8085",
            ),
            None,
        ),
        (SqliteProducer(queue="orders", path="/nowhere"), None),
    ],
)
def test_known_broker_console_is_linked(monkeypatch, producer, address):
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)

    assert console(producer) == address


@pytest.mark.parametrize(
    ("extra", "address"),
    [
        (
            {"management_url": "https://rabbit.example.org:15671/"},
            "https://rabbit.example.org:15671/#/queues/shop%2Feu/orders",
        ),
        ({}, None),
        ({"management_url": False}, None),
        ({"management_url": "https://user:secret@rabbit.example.org"}, None),
    ],
)
def test_rabbitmq_management_url_is_linked_if_configured(extra, address):
    connection = Connection(
        conn_id="rabbitmq_default",
        conn_type="rabbitmq",
        host="rabbit",
        schema="shop/eu",
        login="u",
        password="p",
        extra=extra,
    )

    assert console(RabbitMQProducer(queue="orders"), connection) == address


@pytest.mark.parametrize(
    "value", ["javascript:alert(1)", "file:///etc/passwd", "//host", "http://", "x", "", None]
)
def test_only_web_addresses_are_linked(value):
    assert web_address(value) is None


@pytest.mark.parametrize("history", ["", "http://history:18080/"])
def test_spark_ui_is_linked_and_later_its_history(monkeypatch, history):
    monkeypatch.setenv("AIRFLOW__BROADWAY__SPARK_HISTORY", history)
    pushed: dict[str, Any] = {}
    operator = SimpleNamespace()

    note_spark(operator, task_context(pushed=pushed), "app-1", "http://driver:4040")

    assert pushed == {"_link_SparkLink": "http://driver:4040"}
    ended = SparkLink().get_link(operator, ti_key=TI)
    assert ended == ("http://history:18080/history/app-1/" if history else None)


@pytest.mark.parametrize(
    ("line", "applications"),
    [
        (
            "12:00:00,1 INFO Spark application app-2026-0001; its UI: http://driver:4041\n",
            [("app-2026-0001", "http://driver:4041")],
        ),
        ("INFO Spark application local-1; its UI: \n", [("local-1", "")]),
        ("INFO Spark application local-1; its UI: javascript:x\n", [("local-1", "")]),
        ("Bound SparkUI to 0.0.0.0\n", []),
    ],
)
def test_spark_ui_address_is_read_from_the_driver_log(line, applications):
    seen: list[tuple[str, str]] = []
    hook = SubmitHook.__new__(SubmitHook)
    hook.lines = deque()
    hook._on_application = lambda application_id, ui: seen.append((application_id, ui))

    assert list(hook._watch(iter(["first\n", line]))) == ["first\n", line]

    assert seen == applications
