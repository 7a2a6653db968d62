"""The identity of a message: which values are one, and what the option takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_broadway import Message
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.identity import digest, payload_value
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.properties import encode, staged_text
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.producers.sqs import SqsProducer


@pytest.mark.parametrize(
    ("payload", "pointer", "value"),
    [
        (b'{"id": "a"}', "/id", "a"),
        (b'{"order": {"ids": [7, "b"]}}', "/order/ids/1", "b"),
        (b'{"a/b": {"~": "c"}}', "/a~1b/~0", "c"),
        (b'{"": "d"}', "/", "d"),
        (b'{"0": "e"}', "/0", "e"),
        (b'{"id": "a", "id": "b"}', "/id", "b"),
        (b'{"id": null}', "/id", None),
        (b"{}", "/id", None),
        (b'["a"]', "/1", None),
        (b'["a"]', "/-1", None),
        (b'["a"]', "/a", None),
        (b'{"id": "text"}', "/id/0", None),
        (b'"text"', "/id", None),
        (b"7", "/id", None),
        (b"{", "/id", None),
        (b"\xff\xfe\x00", "/id", None),
        (b"[" * 200_000, "/0", None),
        (b'{"id": %s}' % (b"9" * 5_000), "/id", None),
        (b"", "/id", None),
        (None, "/id", None),
    ],
)
def test_a_pointer_finds_a_value_or_nothing(payload: Any, pointer: str, value: Any) -> None:
    assert payload_value(payload, pointer) == value


@pytest.mark.parametrize("value", [None, "", b"", True, 1.5, ["a"], {"a": 1}])
def test_other_values_are_no_identity(value: Any) -> None:
    assert digest("/id", value) is None


@pytest.mark.parametrize("value", ["a", "ü", "\ud800", b"\xff", 0, -1, 2**63, "x" * 10_000_000])
def test_each_value_has_a_digest_of_its_own(value: Any) -> None:
    key = digest("/id", value)

    assert key is not None
    assert len(key) == 33
    assert key == digest("/id", value)
    assert key not in (digest("/id", "other"), digest("/other", value))


def test_a_number_and_its_text_are_one_identity() -> None:
    assert digest("/id", 7) == digest("/id", "7") == digest("/id", b"7")


def rabbit(**properties: Any) -> Message:
    text = staged_text(b"\x00\x00", encode(**properties), True)
    return Message(b'{"id": 1}', acknowledger=AckRef(None, "g", Delivery(properties=text)))


def attributes(**values: str) -> Message:
    return Message(b'{"id": 1}', metadata={"attributes": values})


RABBIT = RabbitMQProducer(queue="q", on_failure="retry")
PROPERTIES = '{"attributes":{"key":{"data_type":"String","string_value":"a"}}}'


@pytest.mark.parametrize(
    ("producer", "options", "message", "value"),
    [
        (RABBIT, None, rabbit(message_id="a"), "a"),
        (RABBIT, "message_id", rabbit(message_id="a"), "a"),
        (RABBIT, None, rabbit(), None),
        (
            RABBIT,
            None,
            Message(b"", acknowledger=AckRef(None, "g", Delivery(properties="{"))),
            None,
        ),
        (RABBIT, "header:key", rabbit(headers={"key": "a"}), "a"),
        (RABBIT, "header:key", rabbit(headers={"key": 7}), "7"),
        (RABBIT, "header:key", rabbit(headers={"key": ["a"]}), None),
        (RABBIT, "header:key", rabbit(message_id="a"), None),
        (RABBIT, "header:message_id", rabbit(message_id="a"), None),
        (RABBIT, "/id", rabbit(message_id="a"), "1"),
        (SqliteProducer(queue="q"), "header:key", attributes(key="a"), "a"),
        (SqliteProducer(queue="q"), "header:key", Message(b""), None),
        (SqliteProducer(queue="q"), None, attributes(key="a"), None),
        (
            PubSubProducer(subscription="projects/shop-1/subscriptions/orders"),
            "header:key",
            attributes(key="a"),
            "a",
        ),
        (
            KafkaProducer(topics=["t"], group_id="g"),
            "header:key",
            Message(b"", metadata={"headers": [["key", "a"], ["other", "c"], ["key", "b"]]}),
            "b",
        ),
        (
            SqsProducer(queue_name="q"),
            "header:key",
            Message(b"", acknowledger=AckRef(None, "g", Delivery(properties=PROPERTIES))),
            "a",
        ),
        (
            SqsProducer(queue_name="q"),
            "header:key",
            Message(b"", acknowledger=AckRef(None, "g", Delivery(properties="{}"))),
            None,
        ),
    ],
)
def test_each_broker_has_its_headers(
    producer: Any, options: str | None, message: Message, value: str | None
) -> None:
    producer = replace(producer, message_identity=options)
    source = options or "message_id"

    assert producer.identity_of(message) == digest(source, value)


@pytest.mark.parametrize("value", ["header:id", "/id", "/a/b~1c", "/", "{{ var.value.identity }}"])
def test_the_option_takes(value: str) -> None:
    assert SqliteProducer(queue="q", message_identity=value).message_identity == value


@pytest.mark.parametrize("value", ["", "id", "header:", "broker", "a/b", "/a~2", 7, ["/a"]])
def test_other_values_of_the_option_are_errors_that_name_the_valid_ones(value: Any) -> None:
    with pytest.raises(OptionsError, match=r"message_identity.*'header:NAME', a JSON pointer"):
        RabbitMQProducer(queue="q", on_failure="retry", message_identity=value)


def test_brokers_without_the_property_message_id_refuse_it() -> None:
    with pytest.raises(OptionsError, match=r"SqsProducer.message_identity.*leave it out"):
        SqsProducer(queue_name="q", message_identity="message_id")


def test_one_identity_holds_for_all_queues_of_a_producer() -> None:
    producer = RabbitMQProducer(
        queue="q", on_failure="retry", merge_options=lambda index: {"message_identity": "/id"}
    )

    with pytest.raises(OptionsError, match="it is for all producers"):
        producer.merged(0)
