"""What the guide says of options and connections, without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.core.custody.producer import Connection, ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing, OptionsError
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka.client import Cluster, settings_of


class Connections:
    """What Airflow knows."""

    def __init__(self, **known: Connection) -> None:
        self.known: Mapping[str, Connection] = known

    def get(self, conn_id: str) -> Connection:
        if conn_id not in self.known:
            raise ConnectionMissing(f"the Airflow connection {conn_id!r} is not defined")
        return self.known[conn_id]


def made(**options: Any) -> KafkaProducer:
    return KafkaProducer(**{"group_id": "orders", "topics": ["orders"], **options})


def settings(producer: KafkaProducer, connection: Connection | None = None) -> dict[str, Any]:
    known = {} if connection is None else {"kafka_default": connection}
    return settings_of(producer, ProducerEnv(connections=Connections(**known)))


def connection(**about: Any) -> Connection:
    return Connection(conn_id="kafka_default", conn_type="kafka", **about)


def test_connection_extra_is_librdkafka_settings():
    extra = {"bootstrap.servers": "a:1", "socket.keepalive.enable": True, "ssl.ca.location": "/ca"}

    found = settings(made(), connection(extra=extra, host="unused"))

    assert extra.items() <= found.items()


def test_connection_group_is_ignored(monkeypatch):
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr(
        Cluster, "_create_client", lambda self, kind, config: configs.append(config)
    )
    extra = {"bootstrap.servers": "a:1", "group.id": "my-group"}
    known = Connections(kafka_default=connection(extra=extra))

    Cluster(made(group_id="orders"), ProducerEnv(connections=known))

    assert [config["group.id"] for config in configs] == ["orders"]


def test_connection_host_and_login_are_defaults():
    about = connection(host="broker", port=9093, login="me", password="s3cret", extra={})
    own = {"bootstrap.servers": "a:1", "sasl.username": "she", "sasl.password": "hers"}

    found = settings(made(), about)

    assert found["bootstrap.servers"] == "broker:9093"
    assert (found["sasl.username"], found["sasl.password"]) == ("me", "s3cret")
    other = settings(made(), connection(host="broker", login="me", password="s3cret", extra=own))
    assert own.items() <= other.items()


@pytest.mark.parametrize("hosts", ["a:1, b:2", ["a:1", "b:2"]], ids=["text", "list"])
def test_hosts_work_without_connection(hosts):
    assert settings(made(hosts=hosts))["bootstrap.servers"] == "a:1,b:2"
    with pytest.raises(ConnectionMissing):
        settings(made(hosts=hosts, conn_id="another"))
    with pytest.raises(ConnectionMissing):
        settings(made())


def test_missing_broker_is_one_error():
    with pytest.raises(ConnectionMissing, match="no broker of the Kafka cluster is named"):
        settings(made(), connection(extra={}))


def test_settings_override_connection_and_defaults():
    extra = {"bootstrap.servers": "a:1", "security.protocol": "SASL_SSL", "fetch.min.bytes": 7}
    own = {"fetch.min.bytes": 9, "socket.timeout.ms": 1_000, "client.id": "mine"}

    found = settings(made(settings=own), connection(extra=extra))

    assert {**extra, **own}.items() <= found.items()
    assert settings(made(hosts="a:1"))["client.id"].startswith("broadway-")


@pytest.mark.parametrize(
    "name", ["sasl.password", "ssl.key.password", "sasl.oauthbearer.client.secret", "ssl.key.pem"]
)
def test_secret_option_is_refused_and_masked(name):
    with pytest.raises(OptionsError, match="belongs in the connection") as told:
        made(settings={name: "s3cret"})

    assert "s3cret" not in str(told.value)


def test_reserved_setting_is_refused_with_its_option():
    with pytest.raises(OptionsError, match="the option group_id"):
        made(settings={"group.id": "another"})


@pytest.mark.parametrize("topics", [["^orders.*"], ["a b"], [], "orders", ["orders", "orders"]])
def test_topic_pattern_is_refused(topics):
    with pytest.raises(OptionsError, match="no pattern"):
        made(topics=topics)


def test_dead_letter_topic_is_no_source_topic():
    with pytest.raises(OptionsError, match="received again"):
        made(topics=["a", "a-dlt"])


class Orders(Broadway):
    producer = made(hosts="a:1", conn_id=None)

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
    declared = {"producer": made(order=order, hosts="a:1"), **declared}

    with pytest.raises(OptionsError, match="it partitions by topic and partition itself") as raised:
        type("Partitioned", (Orders,), declared)()

    assert raised.value.path == path
