"""Client errors as one sentence, with a way out and without secrets."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.errors import Denied, Truncated, translated


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (KafkaError._TRANSPORT, ProducerUnavailable, "the cluster cannot be reached"),
        (KafkaError._ALL_BROKERS_DOWN, ProducerUnavailable, "check bootstrap.servers"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, Denied, "the topic is not allowed"),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, Denied, "Read on the group"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, ProducerError, "no such topic or partition"),
        (KafkaError.UNKNOWN_MEMBER_ID, ProducerError, "give the pipeline a group_id of its own"),
        (
            KafkaError._LOG_TRUNCATION,
            Truncated,
            "kafka-consumer-groups --reset-offsets starts over",
        ),
        (KafkaError._BAD_MSG, ProducerError, "a batch of messages is damaged, or compressed"),
        (KafkaError._BAD_COMPRESSION, ProducerError, "nothing behind it can be received"),
        (KafkaError._AUTHENTICATION, ProducerError, "does not accept the credentials"),
        (KafkaError._SSL, ProducerError, "TLS fails"),
        (KafkaError.NOT_LEADER_FOR_PARTITION, ProducerError, "NOT_LEADER_FOR_PARTITION"),
        (KafkaError.INVALID_COMMIT_OFFSET_SIZE, ProducerError, "INVALID_COMMIT_OFFSET_SIZE"),
    ],
)
def test_error_names_remedy(code, kind, text):
    found = translated(KafkaException(KafkaError(code)), "it cannot be done", "on there:9092")

    assert type(found) is kind
    assert str(found).startswith("it cannot be done on there:9092: ")
    assert text in str(found)


def test_error_cites_client_connection_log():
    nobody = KafkaError(KafkaError._TRANSPORT)
    seen = [KafkaError(KafkaError._AUTHENTICATION), KafkaError(KafkaError._ALL_BROKERS_DOWN)]

    assert "credentials" in str(translated(nobody, "a", "b", seen))
    assert "TLS fails" in str(translated(nobody, "a", "b", [KafkaError(KafkaError._SSL)]))


def test_foreign_error_is_named():
    assert str(translated(ValueError("odd"), "a", "b")) == "a b: ValueError: odd"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"bogus.name": "x"}, 'No such configuration property: "bogus.name"'),
        (
            {"fetch.wait.max.ms": "soon"},
            'Invalid value for configuration property "fetch.wait.max.ms"',
        ),
        (
            {"socket.timeout.ms": True},
            'Invalid value for configuration property "socket.timeout.ms"',
        ),
    ],
)
def test_setting_refused_by_librdkafka_is_one_error(settings, text):
    producer = KafkaProducer(
        group_id="g", topics=["t"], hosts="127.0.0.1:1", conn_id=None, settings=settings
    )

    with pytest.raises(ProducerError) as refused:
        Cluster(producer, ProducerEnv())

    assert text in str(refused.value)
    assert str(refused.value).endswith("correct the option settings or the extra of the connection")


def test_milliseconds_are_parsed_like_librdkafka():
    settings = {"fetch.wait.max.ms": "0x10", "socket.timeout.ms": "20000"}
    producer = KafkaProducer(
        group_id="g", topics=["t"], hosts="127.0.0.1:1", conn_id=None, settings=settings
    )

    cluster = Cluster(producer, ProducerEnv())

    assert cluster.fetch_wait == 0.016
    cluster.close()
