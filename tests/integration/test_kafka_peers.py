"""Assumptions of other tests: the mock cluster's limits, and checked sums behind a proxy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from confluent_kafka import KafkaError, KafkaException

from tests.kafka_proxy import FETCH, KafkaProxy
from tests.kafka_server import MockKafka

pytestmark = pytest.mark.broker


# ------------------------------------------------------------------------------- the mock alone
def test_the_mock_shows_aborted_messages(kafka_mock):
    """The reason why transactions are tested elsewhere."""
    topic = kafka_mock.topic()
    producer = kafka_mock.producer({"transactional.id": "t"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"aborted")
    producer.flush(30)
    producer.abort_transaction(30)

    assert kafka_mock.bodies(topic) == [b"aborted"]


def test_the_mock_injects_errors(kafka_mock):
    offset_commit = 8
    topic = kafka_mock.topic()
    kafka_mock.tell(
        "push_request_errors_array", offset_commit, [KafkaError.GROUP_AUTHORIZATION_FAILED]
    )

    with pytest.raises(KafkaException) as raised:
        kafka_mock.commit("g", topic, 0, 1)

    assert raised.value.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED


def test_the_mock_ends_with_its_parent(tmp_path):
    server = MockKafka.start(tmp_path)
    assert server.process is not None
    assert server.process.stdin is not None

    server.process.stdin.close()

    assert server.process.wait(timeout=30) == 0


# ------------------------------------------------------------------------------- behind a proxy
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_damaged_batch_is_reported_where_checksums_are_checked(kafka, codec):
    """Without checks, it may be received damaged, or never: librdkafka's default."""
    topic = kafka.topic()
    bodies = [random.Random(number).randbytes(100).hex().encode() for number in range(100)]
    kafka.fill(topic, bodies, settings={"compression.type": codec})
    with (
        KafkaProxy(kafka.bootstrap, change=damage_response) as proxy,
        pytest.raises(KafkaException, match="CRC32C"),
    ):
        replace(kafka, bootstrap=proxy.bootstrap, settings={"check.crcs": True}).read(topic)


def damage_response(kind: int, response: bytes) -> bytes:
    """Changes a byte in the middle of a response with records.

    A change in the header of a batch can make it seem cut off: the client fetches it for ever.
    """
    place = len(response) // 2
    if kind != FETCH or len(response) < 1_000:
        return response
    return response[:place] + bytes([response[place] ^ 0xFF]) + response[place + 1 :]
