from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.core.custody.producer import Connection, ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.address import (
    Address,
    address_for,
    address_of,
    address_of_uri,
)


class Connections:
    def __init__(self, **given: Any) -> None:
        self._connection = Connection(conn_id="rabbit", **given)

    def get(self, conn_id: str) -> Connection:
        return self._connection


def test_address_text_hides_password():
    producer = RabbitMQProducer(queue="q", conn_id="rabbit")
    connections = Connections(
        conn_type="rabbitmq", host="broker", login="me", password="s3cret", schema="flights"
    )

    address = address_for(producer, ProducerEnv(connections=connections))

    assert address.password == "s3cret"
    assert (address.login, address.virtual_host, address.port) == ("me", "flights", 5672)
    assert "s3cret" not in f"{address!r} {producer!r} {address.netloc}"


def test_tls_is_set_by_extra_or_amqps():
    plain = address_of(Connection(conn_id="c", conn_type="rabbitmq", host="b"), name="n")
    safe = address_of(
        Connection(conn_id="c", conn_type="rabbitmq", host="b", extra={"tls": True}), name="n"
    )

    assert (plain.tls, plain.port) == (None, 5672)
    assert (safe.tls, safe.port) == ({}, 5671)
    assert address_of_uri("amqps://b/v", name="n").port == 5671


@pytest.mark.parametrize(
    ("host", "port", "hosts"),
    [
        ("a", None, [("a", 5672)]),
        ("a", 1, [("a", 1)]),
        ("a, b:5673 ,c", None, [("a", 5672), ("b", 5673), ("c", 5672)]),
        ("a,b:2", 1, [("a", 1), ("b", 2)]),
        ("::1,[::2]:3", None, [("::1", 5672), ("::2", 3)]),
    ],
)
def test_connection_may_name_several_hosts(host, port, hosts):
    made = address_of(Connection(conn_id="c", conn_type="rabbitmq", host=host, port=port), name="n")

    assert [(each.host, each.port) for each in made.hosts()] == hosts
    assert [each.others for each in made.hosts()] == [()] * len(hosts)


def test_address_may_name_several_hosts():
    made = address_of_uri("amqps://me@a,b:5673/v?frame_max=8192&channel_max=20", name="n")

    assert [(each.host, each.port) for each in made.hosts()] == [("a", 5671), ("b", 5673)]
    assert (made.login, made.virtual_host) == ("me", "v")
    assert (made.frame_max, made.channel_max) == (8192, 20)


def test_empty_connection_fields_use_defaults():
    extra = {"heartbeat": None, "timeout": "", "tls": None, "tls_ca": "", "management_url": ""}
    made = address_of(
        Connection(conn_id="c", conn_type="rabbitmq", host="b", extra=extra), name="n"
    )

    assert made == address_of(Connection(conn_id="c", conn_type="rabbitmq", host="b"), name="n")


def test_tls_may_be_set_field_by_field():
    extra = {"tls": True, "tls_ca": "/ca.pem", "tls_server_name": "broker"}
    made = address_of(
        Connection(conn_id="c", conn_type="rabbitmq", host="b", extra=extra), name="n"
    )

    assert made.tls == {"ca": "/ca.pem", "server_name": "broker"}
    del extra["tls"]
    assert made.tls == address_of(
        Connection(conn_id="c", conn_type="rabbitmq", host="b", extra=extra), name="n"
    ).tls  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {"conn_type": "aws", "host": "b"},
        {"conn_type": "rabbitmq", "host": " , "},
        {"conn_type": "rabbitmq", "host": "b", "extra": {"frame_max": 100}},
        {"conn_type": "rabbitmq", "host": "b", "extra": {"channel_max": 1}},
        {"conn_type": "rabbitmq", "host": "b", "extra": {"timeout": "nan"}},
        {"conn_type": "rabbitmq", "host": "b", "extra": {"client_properties": "x"}},
        {"conn_type": "rabbitmq", "host": "b", "extra": {"auth_mechanism": "gssapi"}},
        {"conn_type": "rabbitmq", "host": "b", "extra": {"auth_mechanism": "EXTERNAL"}},
        {"conn_type": "rabbitmq"},
        {"conn_type": "rabbitmq", "host": "b", "extra": {"heartbeat": "soon"}},
        {"conn_type": "rabbitmq", "host": "b", "extra": {"tls": "yes"}},
    ],
)
def test_unusable_connection_is_named(given):
    with pytest.raises(ConnectionMissing, match="the connection 'c'"):
        address_of(Connection(conn_id="c", **given), name="n")


@pytest.mark.parametrize("uri", ["http://b", "amqp://", "amqp://b:port", "nonsense"])
def test_malformed_address_error_hides_it(uri):
    with pytest.raises(ConnectionMissing, match="must be amqp://"):
        address_of_uri(uri, name="n")


def test_missing_connection_fields_have_documented_defaults():
    made = address_of(Connection(conn_id="c", conn_type="rabbitmq", host="b"), name="n")
    assert (made.heartbeat, made.timeout, made.blocked_connection_timeout) == (60, 30.0, 300.0)
    assert (made.frame_max, made.channel_max) == (131_072, 2_047)
    assert made.tls is None


@pytest.mark.parametrize(
    ("name", "least"), [("frame_max", 4_096), ("channel_max", 16), ("heartbeat", 0)]
)
def test_minimal_connection_is_accepted(name, least):
    def address(value: int) -> Address:
        extra = {name: value}
        connection = Connection(conn_id="c", conn_type="rabbitmq", host="b", extra=extra)
        return address_of(connection, name="n")

    assert getattr(address(least), name) == least
    with pytest.raises(ConnectionMissing, match=name):
        address(least - 1)
