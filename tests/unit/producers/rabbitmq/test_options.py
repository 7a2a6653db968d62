from __future__ import annotations

import statistics
from typing import Any

import pytest

from airflow_broadway.core.custody.producer import Connection, ProducerEnv
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ConnectionMissing, OptionsError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.producers.rabbitmq import Qos, RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.address import address_for, address_of, address_of_uri
from airflow_broadway.producers.rabbitmq.amqp.backoff import Backoff
from airflow_broadway.producers.rabbitmq.broker.names import QueueNames, rung
from airflow_broadway.producers.rabbitmq.options import backoff_bounds


class Connections:
    def __init__(self, **given: Any) -> None:
        self._connection = Connection(conn_id="rabbit", **given)

    def get(self, conn_id: str) -> Connection:
        return self._connection


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "queue"),
        ({"queue": ""}, "queue"),
        ({"queue": "q", "uri": "amqp://guest:secret@host"}, "uri"),
        ({"queue": "q", "uri": "amqp://host", "conn_id": "c"}, "conn_id"),
        ({"queue": "q", "on_failure": "wat"}, "on_failure"),
        ({"queue": "q", "consume_options": {"no_ack": True}}, "consume_options"),
        ({"queue": "q", "declare": {"auto_delete": True}}, "declare"),
        ({"queue": "q", "declare": {"exclusive": True}}, "declare"),
        ({"queue": "q", "metadata": ["colour"]}, "metadata"),
        ({"queue": "q", "bindings": [("exchange",)]}, "bindings"),
        ({"queue": "q", "backoff_min": 5.0, "backoff_max": 1.0}, "backoff_min"),
        ({"queue": "q", "queue_type": "classic"}, "queue_type"),
        ({"queue": "q", "backoff_type": "linear"}, "backoff_type"),
        ({"queue": "q", "prefetch": 5}, "prefetch"),
    ],
)
def test_an_option_that_breaks_its_rule_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionsError, match=rf"RabbitMQProducer\.{name}"):
        RabbitMQProducer(**options)


def test_a_password_is_in_no_text_about_an_address() -> None:
    producer = RabbitMQProducer(queue="q", conn_id="rabbit")
    connections = Connections(
        conn_type="rabbitmq", host="broker", login="me", password="s3cret", schema="flights"
    )

    address = address_for(producer, ProducerEnv(connections=connections))

    assert address.password == "s3cret"
    assert (address.login, address.virtual_host, address.port) == ("me", "flights", 5672)
    assert "s3cret" not in f"{address!r} {producer!r} {address.shown}"


def test_tls_is_by_extra_or_by_amqps() -> None:
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
def test_a_connection_may_name_several_hosts(
    host: str, port: int | None, hosts: list[tuple[str, int]]
) -> None:
    made = address_of(Connection(conn_id="c", conn_type="rabbitmq", host=host, port=port), name="n")

    assert [(each.host, each.port) for each in made.hosts()] == hosts
    assert [each.others for each in made.hosts()] == [()] * len(hosts)


def test_an_address_may_name_several_hosts() -> None:
    made = address_of_uri("amqps://me@a,b:5673/v?frame_max=8192&channel_max=20", name="n")

    assert [(each.host, each.port) for each in made.hosts()] == [("a", 5671), ("b", 5673)]
    assert (made.login, made.virtual_host) == ("me", "v")
    assert (made.frame_max, made.channel_max) == (8192, 20)


def test_what_a_connections_form_leaves_empty_is_not_given() -> None:
    extra = {"heartbeat": None, "timeout": "", "tls": None, "tls_ca": "", "management_url": ""}
    made = address_of(
        Connection(conn_id="c", conn_type="rabbitmq", host="b", extra=extra), name="n"
    )

    assert made == address_of(Connection(conn_id="c", conn_type="rabbitmq", host="b"), name="n")


def test_tls_may_be_told_field_by_field() -> None:
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
def test_a_connection_that_cannot_serve_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(ConnectionMissing, match="the connection 'c'"):
        address_of(Connection(conn_id="c", **given), name="n")


@pytest.mark.parametrize("uri", ["http://b", "amqp://", "amqp://b:port", "nonsense"])
def test_an_address_that_is_none_is_an_error_without_it(uri: str) -> None:
    with pytest.raises(ConnectionMissing, match="must be amqp://"):
        address_of_uri(uri, name="n")


def message(*, attempt: int = 1, redelivered: bool = False, **delivery: Any) -> Message:
    return Message(
        b"",
        attempt=attempt,
        redelivered=redelivered,
        acknowledger=AckRef(None, None, Delivery(**delivery)),
        status=Status("failed", "why"),
    )


def test_retry_counts_attempts_and_reject_and_requeue_does_not() -> None:
    retry = RabbitMQProducer(queue="q", on_failure="retry")
    always = RabbitMQProducer(queue="q", on_failure="reject_and_requeue")
    worn = message(attempt=99, redelivered=True)

    assert retry.verdict(worn, failed=True, stage="batch").action is Action.DEAD_LETTER
    assert always.verdict(worn, failed=True, stage="batch") == Verdict(
        Action.RETRY, 0.0, "why", "batch"
    )


def test_options_are_merged_for_each_producer_and_checked() -> None:
    producer = RabbitMQProducer(
        queue="q", merge_options=lambda index: {"qos": {"prefetch_count": 10 + index}}
    )

    assert producer.merged(3).qos.prefetch_count == 13
    assert producer.qos == Qos()
    wrong = RabbitMQProducer(queue="q", merge_options=lambda index: {"colour": index})
    with pytest.raises(OptionsError, match=r"merge_options\.colour"):
        wrong.merged(0)


def test_a_random_backoff_stays_within_its_bounds_and_spreads() -> None:
    for kind in ("rand", "rand_exp"):
        backoff = Backoff(kind, *backoff_bounds(1.0, 30.0), seed=1)
        draws = [backoff.next() or 0.0 for _ in range(500)]

        assert all(1.0 <= draw <= 30.0 for draw in draws)
        assert statistics.pstdev(draws) > 1.0


def test_a_delay_takes_the_step_that_is_no_more_than_a_tenth_too_short() -> None:
    assert [rung(delay) for delay in (0, 0.5, 1, 5, 5.5, 6, 60, 66, 70, 4100, 90_000)] == [
        None,
        1,
        1,
        5,
        5,
        15,
        60,
        60,
        300,
        21600,
        21600,
    ]


def test_names_of_queues_stay_within_the_limit() -> None:
    queues = QueueNames("ż" * 120)

    for name in (queues.lease("g"), queues.returns, queues.dead, queues.delay(21600)):
        assert len(name.encode()) <= 255
    assert QueueNames("a").lease("g") != QueueNames("b").lease("g")
