"""Options and connections as documented in the guide, without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing, OptionsError
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka.client import Cluster, settings_of


class Connections:
    """Airflow's connections."""

    def __init__(self, **connections: Connection) -> None:
        self.known: Mapping[str, Connection] = connections

    def get(self, conn_id: str) -> Connection:
        if conn_id not in self.known:
            raise ConnectionMissing(f"the Airflow connection {conn_id!r} is not defined")
        return self.known[conn_id]


def producer_of(**options: Any) -> KafkaProducer:
    return KafkaProducer(**{"group_id": "orders", "topics": ["orders"], **options})


def settings(producer: KafkaProducer, connection: Connection | None = None) -> dict[str, Any]:
    connections = {} if connection is None else {"kafka_default": connection}
    return settings_of(producer, ProducerEnv(connections=Connections(**connections)))


def connection(**fields: Any) -> Connection:
    return Connection(conn_id="kafka_default", conn_type="kafka", **fields)


def test_connection_extra_is_librdkafka_settings():
    extra = {"bootstrap.servers": "a:1", "socket.keepalive.enable": True, "ssl.ca.location": "/ca"}

    merged = settings(producer_of(), connection(extra=extra, host="unused"))

    assert extra.items() <= merged.items()


def test_connection_group_is_ignored(monkeypatch):
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr(
        Cluster, "_create_client", lambda self, kind, config: configs.append(config)
    )
    extra = {"bootstrap.servers": "a:1", "group.id": "my-group"}
    connections = Connections(kafka_default=connection(extra=extra))

    Cluster(producer_of(group_id="orders"), ProducerEnv(connections=connections))

    assert [config["group.id"] for config in configs] == ["orders"]


def test_connection_host_and_login_are_defaults():
    fields = connection(host="broker", port=9093, login="me", password="s3cret", extra={})
    own = {"bootstrap.servers": "a:1", "sasl.username": "she", "sasl.password": "hers"}

    merged = settings(producer_of(), fields)

    assert merged["bootstrap.servers"] == "broker:9093"
    assert (merged["sasl.username"], merged["sasl.password"]) == ("me", "s3cret")
    other = settings(
        producer_of(), connection(host="broker", login="me", password="s3cret", extra=own)
    )
    assert own.items() <= other.items()


@pytest.mark.parametrize("hosts", ["a:1, b:2", ["a:1", "b:2"]], ids=["text", "list"])
def test_hosts_work_without_connection(hosts):
    assert settings(producer_of(hosts=hosts))["bootstrap.servers"] == "a:1,b:2"
    with pytest.raises(ConnectionMissing):
        settings(producer_of(hosts=hosts, conn_id="another"))
    with pytest.raises(ConnectionMissing):
        settings(producer_of())


def test_missing_broker_is_one_error():
    with pytest.raises(ConnectionMissing, match="no broker of the Kafka cluster is named"):
        settings(producer_of(), connection(extra={}))


def test_settings_override_connection_and_defaults():
    extra = {"bootstrap.servers": "a:1", "security.protocol": "SASL_SSL", "fetch.min.bytes": 7}
    own = {"fetch.min.bytes": 9, "socket.timeout.ms": 1_000, "client.id": "mine"}

    merged = settings(producer_of(settings=own), connection(extra=extra))

    assert {**extra, **own}.items() <= merged.items()
    assert settings(producer_of(hosts="a:1"))["client.id"].startswith("broadway-")


class Orders(Broadway):
    producer = producer_of(hosts="a:1", conn_id=None)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


def by_size(message: Message) -> int:
    return message.size


@pytest.mark.parametrize(
    ("declared", "path"),
    [
        ({"partition_by": staticmethod(by_size)}, "partition_by"),
        ({"processors": Processors(partition_by=by_size)}, "processors.partition_by"),
        (
            {"batchers": {"one": Batcher(engine="python", partition_by=by_size)}},
            "batchers.one.partition_by",
        ),
    ],
)
@pytest.mark.parametrize("order", ["partition", "none"])
def test_partition_by_is_refused_at_every_level(declared, path, order):
    declared = {"producer": producer_of(order=order, hosts="a:1"), **declared}

    with pytest.raises(OptionsError, match="it partitions by topic and partition itself") as raised:
        type("Partitioned", (Orders,), declared)()

    assert raised.value.path == path
