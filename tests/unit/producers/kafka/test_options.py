"""Options of a Kafka producer, checked before it connects."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.core.errors import ConnectionMissing, OptionsError
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka.client import library
from airflow_broadway.producers.kafka.options import place_of, reset_timestamp


def producer(**options: Any) -> KafkaProducer:
    return KafkaProducer(**{"group_id": "g", "topics": ["flights"], **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": "flights"}, "a list of topics' names: up to 249 letters"),
        ({"topics": []}, "a list of topics' names"),
        ({"topics": ["^flights.*"]}, "no pattern, got: ['^flights.*']"),
        ({"topics": ["a", "a"]}, "a list of topics' names"),
        ({"topics": ["a b"]}, "no pattern, got: ['a b']"),
        ({"topics": ["a", "a-dlt"]}, "dead letters would be received again"),
        ({"topics": [".."]}, "a list of topics' names"),
        ({"group_id": ""}, "expected a non-empty string"),
        ({"hosts": "kafka"}, "'host:port,host:port', or a list of"),
        ({"hosts": ["kafka:1", "kafka"]}, "'host:port,host:port', or a list of"),
        (
            {"offset_reset_policy": "newest"},
            "'earliest', 'latest' or a timestamp with its time zone",
        ),
        ({"offset_reset_policy": "2026-01-31T12:00:00"}, "a timestamp with its time zone"),
        ({"order": "total"}, "expected one of ['key', 'none', 'partition'], got: 'total'"),
        ({"on_failure": "noop"}, "one of ['ack', 'dead_letter', 'halt', 'retry'], got: 'noop'"),
        ({"dead_letter": "flights"}, "none of the topics: dead letters would be received again"),
        ({"dead_letter": "flights.retry"}, "dead letters would be received again"),
        (
            {"retry_topic": "flights"},
            "none of the topics: messages to be retried would be received",
        ),
        ({"dead_letter": "a letter"}, "a topic's name"),
        ({"settings": {"group.id": "x"}}, "expected nothing: the option group_id"),
        ({"settings": {"enable.auto.commit": True}}, "expected nothing: offsets are committed by"),
        ({"settings": {"isolation.level": "read_uncommitted"}}, "what was aborted is never read"),
        ({"settings": {"sasl.password": "hunter2"}}, "no secret: it belongs in the connection's"),
        ({"settings": {"ssl.key.pem": "hunter2"}}, "no secret: it belongs in the connection's"),
        ({"settings": {"ssl.key.password": "hunter2"}}, "no secret: it belongs in the"),
        ({"settings": {"sasl.oauthbearer.client.secret": "hunter2"}}, "no secret: it belongs in"),
        ({"concurency": 2}, "did you mean 'concurrency'?"),
    ],
)
def test_invalid_option_is_reported_with_rule(options, message):
    with pytest.raises(OptionsError, match=re.escape(message)) as raised:
        producer(**options)

    assert "hunter2" not in str(raised.value)


def test_timestamp_keeps_time_zone():
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    for text in ("2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", noon):
        assert reset_timestamp(producer(offset_reset_policy=text).offset_reset_policy) == noon
    assert reset_timestamp("latest") is None


def test_templated_topics_are_parsed_when_rendered():
    class Flights(Broadway):
        producer = KafkaProducer(group_id="g", topics=["flights"])

    flights = Flights(producer={"topics": "{{ var.value.topics }}"})
    assert flights.producer.topics == "{{ var.value.topics }}"
    rendered = Flights.from_rendered({"producer": {"topics": "a, b"}})
    assert rendered.producer.topics == ["a", "b"]


def test_missing_client_error_names_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)

    with pytest.raises(ConnectionMissing) as raised:
        library()

    error = "KafkaProducer needs confluent-kafka: install airflow-broadway[kafka]"
    assert str(raised.value) == error


# ------------------------------------------------------------------------------- partitions
def message(number: int, key: str | None) -> Message:
    return Message(b"", message_id=f"a-b-3-{number}", metadata={"key": key})


def test_ordered_messages_share_one_processor():
    one, same, other = message(1, "a"), message(2, "a"), message(3, "b")

    [partition] = producer().prepare_for_start(_plain()).values()
    assert partition(one) == partition(same) == partition(other)
    [by_key] = producer(order="key").prepare_for_start(_plain()).values()
    assert by_key(one) == by_key(same) != by_key(other)
    assert producer(order="none").prepare_for_start(_plain()) == {}


@pytest.mark.parametrize("order", ["partition", "key", "none"])
@pytest.mark.parametrize(("processors", "batches"), [(1, 1), (2, 1), (1, 2)])
def test_sequential_stage_is_not_partitioned(order, processors, batches):
    kind = type(
        "Flights",
        (Broadway,),
        {
            "producer": producer(order=order),
            "processors": Processors(concurrency=processors),
            "batchers": {"one": Batcher(), "other": Batcher(engine="python", concurrency=batches)},
        },
    )

    partitioned = order != "none" and processors + batches > 2

    assert (kind().partition_by is not None) is partitioned


def test_order_groups_are_partitions_or_keys():
    keyed, without = message(1, "a"), message(2, None)

    assert producer().group_of(keyed) == producer().group_of(without) == "a-b-3"
    assert producer(order="key").group_of(keyed) == "a-b-3 a"
    assert producer(order="key").group_of(without) is None
    assert producer(order="none").group_of(keyed) is None
    orders = ("partition", "key", "none")
    assert [producer(order=order).keeps_order for order in orders] == [True, True, False]


def test_message_id_names_position():
    assert place_of("a-b-3-17") == ("a-b", 3, 17)
    for text in ("17", "-3-17", "a-b", ""):
        with pytest.raises(ValueError, match=r"unpack|literal|^-3-17$"):
            place_of(text)


def _plain() -> Any:
    class Plain(Broadway):
        producer = producer()

    flights = Plain()
    flights.partition_by = None
    flights.processors = Processors()
    return flights
