"""The limits that the guide names, each at its edge."""

from __future__ import annotations

import itertools
import logging
from datetime import timedelta
from typing import Any

import pytest

from airflow_broadway.core.custody.producer import Connection, ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import ConnectionMissing, OptionsError, ProducerError
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.address import Address, address_of
from airflow_broadway.producers.rabbitmq.amqp.wire import connection_class
from airflow_broadway.producers.rabbitmq.broker.names import LADDER, QueueNames, rung
from airflow_broadway.producers.rabbitmq.broker.sweep import due_at
from airflow_broadway.producers.rabbitmq.receive import source
from airflow_broadway.producers.rabbitmq.receive.buffer import Buffer
from airflow_broadway.producers.rabbitmq.receive.quarantine import Aside
from airflow_broadway.testing import ManualClock


def test_a_delay_may_come_a_tenth_early_and_no_more() -> None:
    for shorter, longer in itertools.pairwise(LADDER):
        assert rung(shorter / 0.9 - 1e-6) == shorter
        assert rung(shorter / 0.9 + 1e-6) == longer
    assert rung(LADDER[-1] * 100) == LADDER[-1]


def test_a_name_of_255_bytes_stays_and_a_longer_one_is_hashed() -> None:
    room = 255 - len("broadway.returns.")
    assert QueueNames("q" * room).returns == "broadway.returns." + "q" * room
    hashed = QueueNames("q" * (room + 1)).returns
    assert len(hashed) == len("broadway.returns.") + 32
    assert "q" not in hashed.removeprefix("broadway.returns.")
    # Bytes, not characters
    assert "ż" in QueueNames("ż" * (room // 2)).returns
    assert "ż" not in QueueNames("ż" * (room // 2 + 1)).returns


def test_a_lease_queue_is_looked_at_a_minute_after_its_last_bundle_can_have_lapsed() -> None:
    assert due_at(1_000.0, 600.0) == (1_000.0 + 600.0 + 60.0, 1_000.0 + 600.0 + 60.0 + 3_600.0)


def test_the_first_ten_that_are_set_aside_are_logged_and_all_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    buffer = Buffer()
    for number in range(12):
        buffer.add([Aside(f"m{number}", "crashed" if number % 2 else "oversized", "why")])
    assert [text.split()[1] for text in caplog.messages] == [f"m{number}" for number in range(10)]
    assert buffer.set_aside == {"oversized": 6, "crashed": 6}


@pytest.mark.parametrize(
    ("name", "least"), [("frame_max", 4_096), ("channel_max", 16), ("heartbeat", 0)]
)
def test_the_least_that_a_connection_may_say(name: str, least: int) -> None:
    def address(value: int) -> Address:
        extra = {name: value}
        connection = Connection(conn_id="c", conn_type="rabbitmq", host="b", extra=extra)
        return address_of(connection, name="n")

    assert getattr(address(least), name) == least
    with pytest.raises(ConnectionMissing, match=name):
        address(least - 1)


def test_what_a_connection_does_not_say_is_as_the_guide_has_it() -> None:
    made = address_of(Connection(conn_id="c", conn_type="rabbitmq", host="b"), name="n")
    assert (made.heartbeat, made.timeout, made.blocked_timeout) == (60, 30.0, 300.0)
    assert (made.frame_max, made.channel_max) == (131_072, 2_047)
    assert made.tls is None


@pytest.mark.parametrize("name", ["exclusive", "auto_delete"])
def test_a_source_that_would_end_with_its_connection_is_not_declared(name: str) -> None:
    with pytest.raises(OptionsError, match=r"RabbitMQProducer\.declare"):
        RabbitMQProducer(queue="q", declare={name: True})


@pytest.mark.parametrize(("given", "warned"), [({}, True), ({"on_failure": "retry"}, False)])
def test_a_run_warns_if_it_is_not_told_what_becomes_of_failures(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    warned: bool,
) -> None:
    monkeypatch.setattr(source, "RabbitSource", lambda *_: None)
    RabbitMQProducer(queue="q", **given).source(ProducerEnv())
    assert ("on_failure should be specified" in caplog.text) is warned


def test_a_lease_has_a_fixed_bound_which_no_renewal_moves() -> None:
    clock = ManualClock()
    producer = RabbitMQProducer(queue="q", uri="amqp://127.0.0.1:1", lease=600.0)
    custodian = producer.custodian(ProducerEnv(clock=clock))
    lease = Lease(
        kind="rabbitmq",
        generation="g",
        seconds=600.0,
        deadline=clock.now() + timedelta(seconds=600.0),
        state={"queue": "q", "lease_queue": QueueNames("q").lease("g"), "index": 0},
    )
    clock.advance(599.0)
    assert custodian.renew(lease) == lease
    clock.advance(1.0)
    assert custodian.renew(lease) is None
    assert not producer.renews


@pytest.mark.parametrize("left", ["_on_data_available", "_process_frame"])
def test_a_pika_without_the_methods_that_are_overridden_is_refused(
    monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setattr("pika.SelectConnection", type("Other", (), {left: None}))
    with pytest.raises(ProducerError, match=r"pika .* is not supported: install a release from 1"):
        connection_class()
