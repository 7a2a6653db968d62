"""Requests of the Kafka client, against a cluster that does not answer."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka import KafkaProducer, client


class Consumer:
    """A consumer whose first requests for watermark offsets fail; it finds no leader by itself."""

    def __init__(self, *codes: int) -> None:
        self._codes = list(codes)
        self._stale = False

    def get_watermark_offsets(self, partition: object, timeout: float) -> tuple[int, int]:
        if self._codes or self._stale:
            self._stale = True
            raise KafkaException(KafkaError(self._codes.pop(0)))
        return 3, 7

    def list_topics(self, timeout: float) -> None:
        self._stale = False

    def poll(self, timeout: float) -> None:
        return None


def cluster(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> client.Cluster:
    monkeypatch.setattr(client, "_RETRY_INTERVAL", 0.001)
    producer = KafkaProducer(group_id="g", topics=["t"], hosts="127.0.0.1:1")
    made = client.Cluster(producer, ProducerEnv())
    made.consumer.close()
    made.consumer = consumer  # type: ignore[assignment]
    return made


def test_a_request_is_retried_while_the_partitions_leader_moves(monkeypatch):
    moving = Consumer(
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError._TIMED_OUT,
    )
    assert cluster(moving, monkeypatch).ends(("t", 0)) == (3, 7)


def test_a_request_is_not_retried_after_an_error_that_stays(monkeypatch):
    denied = Consumer(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(ProducerError, match="the ends of t-0 cannot be read"):
        cluster(denied, monkeypatch).ends(("t", 0))
