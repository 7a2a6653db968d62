"""What a Kafka producer may be told, and what is refused before anybody connects."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.core.custody.producer import Connection, ProducerEnv
from airflow_broadway.core.errors import ConnectionMissing, OptionsError
from airflow_broadway.producers.kafka import ClientConfig, KafkaProducer
from airflow_broadway.producers.kafka.client import library, settings_of
from airflow_broadway.producers.kafka.options import place_of, reset_instant


def producer(**options: Any) -> KafkaProducer:
    return KafkaProducer(**{"group_id": "g", "topics": ["flights"], **options})


class Known:
    """A connection, whatever its id."""

    def __init__(self, **about: Any) -> None:
        self._about = about

    def get(self, conn_id: str) -> Connection:
        return Connection(conn_id=conn_id, conn_type="kafka", **self._about)


def settings(made: KafkaProducer, **connection: Any) -> dict[str, Any]:
    return settings_of(made, ProducerEnv(connections=Known(**connection)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": "flights"}, "a list of topics' names: up to 249 letters"),
        ({"topics": []}, "a list of topics' names"),
        ({"topics": ["^flights.*"]}, "no pattern, got: ['^flights.*']"),
        ({"topics": ["a", "a"]}, "a list of topics' names"),
        ({"topics": [".."]}, "a list of topics' names"),
        ({"group_id": ""}, "expected a non-empty string"),
        ({"hosts": "kafka"}, "'host:port,host:port', or a list of"),
        ({"hosts": [("kafka", 0)]}, "'host:port,host:port', or a list of"),
        (
            {"offset_reset_policy": "newest"},
            "'earliest', 'latest' or an instant with its time zone",
        ),
        ({"offset_reset_policy": "2026-01-31T12:00:00"}, "an instant with its time zone"),
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
        ({"settings": {"ssl.key.pem": "-----BEGIN"}}, "no secret: it belongs in the connection's"),
        ({"concurency": 2}, "did you mean 'concurrency'?"),
    ],
)
def test_what_is_wrong_is_told_with_the_rule(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=re.escape(message)) as raised:
        producer(**options)

    assert "hunter2" not in str(raised.value)


def test_options_of_brokers_are_read_in_each_form() -> None:
    for hosts in ("a:1,b:2", ["a:1", "b:2"], [("a", 1), ("b", 2)]):
        assert settings(producer(hosts=hosts))["bootstrap.servers"] == "a:1,b:2"


def test_an_instant_is_read_with_its_zone() -> None:
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    for text in ("2026-01-31T12:00:00Z", "2026-01-31T13:00:00+01:00", noon):
        assert reset_instant(producer(offset_reset_policy=text).offset_reset_policy) == noon
    assert reset_instant("latest") is None


def test_topics_of_a_template_are_read_when_it_is_rendered() -> None:
    class Flights(Broadway):
        producer = KafkaProducer(group_id="g", topics=["flights"])

    made = Flights(producer={"topics": "{{ var.value.topics }}"})
    assert made.producer.topics == "{{ var.value.topics }}"
    rendered = Flights.from_rendered({"producer": {"topics": "a, b"}})
    assert rendered.producer.topics == ["a", "b"]


def test_a_connection_is_librdkafkas_settings_and_options_win() -> None:
    extra = {
        "bootstrap.servers": "there:9092",
        "security.protocol": "SASL_SSL",
        "sasl.password": "hunter2",
        "fetch.min.bytes": 7,
    }
    made = settings(producer(settings={"fetch.min.bytes": 9}), extra=extra)

    assert made["bootstrap.servers"] == "there:9092"
    assert made["fetch.min.bytes"] == 9
    assert made["security.protocol"] == "SASL_SSL"
    assert made["sasl.password"] == "hunter2"


def test_host_login_and_password_of_a_connection_are_understood() -> None:
    made = settings(
        producer(client_config=ClientConfig(sasl="PLAIN", ssl=True, client_id_prefix="mine")),
        host="there",
        port=9093,
        login="ann",
        password="hunter2",
    )

    assert made["bootstrap.servers"] == "there:9093"
    assert (made["sasl.username"], made["sasl.password"]) == ("ann", "hunter2")
    assert (made["security.protocol"], made["sasl.mechanism"]) == ("SASL_SSL", "PLAIN")
    assert made["client.id"].startswith("mine-")


def test_nobody_who_names_a_broker_is_one_error() -> None:
    with pytest.raises(ConnectionMissing, match=r'extra \{"bootstrap.servers": "host:port"\}, or'):
        settings(producer())
    # The usual connection need not be there, where a broker is named
    made = settings_of(producer(hosts="a:1"), ProducerEnv())
    assert made["bootstrap.servers"] == "a:1"
    with pytest.raises(ConnectionMissing, match="'mine' is not defined"):
        settings_of(producer(hosts="a:1", conn_id="mine"), ProducerEnv())


def test_without_the_client_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)

    with pytest.raises(ConnectionMissing) as raised:
        library()

    assert str(raised.value) == (
        "KafkaProducer needs confluent-kafka: install airflow-broadway[kafka]"
    )


# ------------------------------------------------------------------------------- partitions
def by_zero(message: Message) -> int:
    return 0


@pytest.mark.parametrize(
    ("about", "path"),
    [
        ({"partition_by": by_zero}, "partition_by"),
        ({"processors": Processors(partition_by=by_zero)}, "processors.partition_by"),
        (
            {"batchers": {"default": Batcher(engine="python", partition_by=by_zero)}},
            "batchers.default.partition_by",
        ),
    ],
)
@pytest.mark.parametrize("order", ["partition", "none"])
def test_partition_by_is_the_producers(about: dict[str, Any], path: str, order: str) -> None:
    made = {name: staticmethod(v) if name == "partition_by" else v for name, v in about.items()}
    kind = type("Flights", (Broadway,), {"producer": producer(order=order), **made})

    with pytest.raises(OptionsError, match="nothing beside a KafkaProducer") as raised:
        kind()

    assert raised.value.path == path


def message(number: int, key: str | None) -> Message:
    return Message(b"", message_id=f"a-b-3-{number}", metadata={"key": key})


def test_what_stays_in_order_goes_to_one_processor() -> None:
    one, same, other = message(1, "a"), message(2, "a"), message(3, "b")

    [partition] = producer().prepare_for_start(_plain()).values()
    assert partition(one) == partition(same) == partition(other)
    [by_key] = producer(order="key").prepare_for_start(_plain()).values()
    assert by_key(one) == by_key(same) != by_key(other)
    assert producer(order="none").prepare_for_start(_plain()) == {}


@pytest.mark.parametrize("order", ["partition", "key", "none"])
@pytest.mark.parametrize(("processors", "batches"), [(1, 1), (2, 1), (1, 2)])
def test_where_nothing_runs_side_by_side_nothing_is_parted(
    order: str, processors: int, batches: int
) -> None:
    kind = type(
        "Flights",
        (Broadway,),
        {
            "producer": producer(order=order),
            "processors": Processors(concurrency=processors),
            "batchers": {"one": Batcher(), "other": Batcher(engine="python", concurrency=batches)},
        },
    )

    parted = order != "none" and processors + batches > 2

    assert (kind().partition_by is not None) is parted


def test_groups_of_order_are_partitions_or_keys() -> None:
    keyed, without = message(1, "a"), message(2, None)

    assert producer().group_of(keyed) == producer().group_of(without) == "a-b-3"
    assert producer(order="key").group_of(keyed) == "a-b-3 a"
    assert producer(order="key").group_of(without) is None
    assert producer(order="none").group_of(keyed) is None
    assert [producer(order=each).keeps_order for each in ("partition", "key", "none")] == [
        True,
        True,
        False,
    ]


def test_an_id_says_where_a_message_is() -> None:
    assert place_of("a-b-3-17") == ("a-b", 3, 17)
    for text in ("17", "-3-17", "a-b", ""):
        with pytest.raises(ValueError, match=r"unpack|literal|^-3-17$"):
            place_of(text)


def _plain() -> Any:
    class Plain(Broadway):
        producer = producer()

    made = Plain()
    made.partition_by = None
    made.processors = Processors()
    return made
