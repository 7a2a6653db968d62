"""What the client says, as one sentence with a way out and without secrets."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
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
def test_each_error_says_what_to_do(code: int, kind: type[ProducerError], text: str) -> None:
    found = translated(KafkaException(KafkaError(code)), "it cannot be done", "on there:9092")

    assert type(found) is kind
    assert str(found).startswith("it cannot be done on there:9092: ")
    assert text in str(found)


def test_the_cause_is_what_the_client_said_of_its_connections() -> None:
    nobody = KafkaError(KafkaError._TRANSPORT)
    seen = [KafkaError(KafkaError._AUTHENTICATION), KafkaError(KafkaError._ALL_BROKERS_DOWN)]

    assert "credentials" in str(translated(nobody, "a", "b", seen))
    assert "TLS fails" in str(translated(nobody, "a", "b", [KafkaError(KafkaError._SSL)]))


def test_what_is_no_error_of_the_client_is_named() -> None:
    assert str(translated(ValueError("odd"), "a", "b")) == "a b: ValueError: odd"
