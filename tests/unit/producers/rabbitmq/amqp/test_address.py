from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.address import (
    Address,
    address_for,
    address_of,
    address_of_uri,
)


class Connections:
    def __init__(self, **fields: Any) -> None:
        self._connection = Connection(conn_id="rabbit", **fields)

    def get(self, conn_id: str) -> Connection:
        return self._connection


def address(**fields: Any) -> Address:
    """Returns the address of a connection with these fields."""
    fields = {"conn_type": "rabbitmq", "host": "b", **fields}
    return address_of(Connection(conn_id="c", **fields), name="n")


def test_address_text_hides_password():
    producer = RabbitMQProducer(queue="q", conn_id="rabbit")
    connections = Connections(
        conn_type="rabbitmq", host="broker", login="me", password="s3cret", schema="flights"
    )

    shown = address_for(producer, ProducerEnv(connections=connections))

    assert shown.password == "s3cret"
    assert (shown.login, shown.virtual_host, shown.port) == ("me", "flights", 5672)
    assert "s3cret" not in f"{shown!r} {producer!r} {shown.netloc}"


def test_tls_is_set_by_extra_or_amqps():
    plain = address()
    safe = address(extra={"tls": True})

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
    parsed = address(host=host, port=port)

    assert [(host.host, host.port) for host in parsed.hosts()] == hosts
    assert [host.others for host in parsed.hosts()] == [()] * len(hosts)


def test_address_may_name_several_hosts():
    parsed = address_of_uri("amqps://me@a,b:5673/v?frame_max=8192&channel_max=20", name="n")

    assert [(host.host, host.port) for host in parsed.hosts()] == [("a", 5671), ("b", 5673)]
    assert (parsed.login, parsed.virtual_host) == ("me", "v")
    assert (parsed.frame_max, parsed.channel_max) == (8192, 20)


def test_empty_connection_fields_use_defaults():
    extra = {"heartbeat": None, "timeout": "", "tls": None, "tls_ca": "", "management_url": ""}
    parsed = address(extra=extra)

    assert parsed == address()


def test_tls_may_be_set_field_by_field():
    extra = {"tls": True, "tls_ca": "/ca.pem", "tls_server_name": "broker"}
    parsed = address(extra=extra)

    assert parsed.tls == {"ca": "/ca.pem", "server_name": "broker"}
    del extra["tls"]
    assert parsed.tls == address(extra=extra).tls


@pytest.mark.parametrize(
    "fields",
    [
        {"conn_type": "aws"},
        {"host": " , "},
        {"extra": {"frame_max": 100}},
        {"extra": {"channel_max": 1}},
        {"extra": {"timeout": "nan"}},
        {"extra": {"client_properties": "x"}},
        {"extra": {"auth_mechanism": "gssapi"}},
        {"extra": {"auth_mechanism": "EXTERNAL"}},
        {"host": ""},
        {"extra": {"heartbeat": "soon"}},
        {"extra": {"tls": "yes"}},
    ],
)
def test_unusable_connection_is_named(fields):
    with pytest.raises(ConnectionMissing, match="the connection 'c'"):
        address(**fields)


@pytest.mark.parametrize("uri", ["http://b", "amqp://", "amqp://b:port", "nonsense"])
def test_malformed_address_error_hides_it(uri):
    with pytest.raises(ConnectionMissing, match="must be amqp://"):
        address_of_uri(uri, name="n")


def test_missing_connection_fields_have_documented_defaults():
    parsed = address()
    assert (parsed.heartbeat, parsed.timeout, parsed.blocked_connection_timeout) == (
        60,
        30.0,
        300.0,
    )
    assert (parsed.frame_max, parsed.channel_max) == (131_072, 2_047)
    assert parsed.tls is None


@pytest.mark.parametrize(
    ("name", "least"), [("frame_max", 4_096), ("channel_max", 16), ("heartbeat", 0)]
)
def test_minimal_connection_is_accepted(name, least):
    assert getattr(address(extra={name: least}), name) == least
    with pytest.raises(ConnectionMissing, match=name):
        address(extra={name: least - 1})
