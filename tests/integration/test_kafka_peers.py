"""What the Kafkas of the tests can and cannot: what other tests rest on."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from tests.kafka_fixtures import on_apache_kafka, skip_without_apache_kafka
from tests.kafka_proxy import FETCH, KafkaProxy
from tests.kafka_server import ApacheKafka, KafkaServer, MockKafka
from tests.waiting import eventually

pytestmark = pytest.mark.broker

BODIES = [str(number).encode() for number in range(100)]


def an_hour_ago() -> int:
    """Milliseconds; what claims to be older than a week is removed, by Kafka's retention."""
    return int((time.time() - 3_600) * 1_000)


# ------------------------------------------------------------------------------- produce, consume
def test_what_is_produced_is_there_in_order(kafka: KafkaServer) -> None:
    topic = kafka.topic(partitions=3)

    kafka.fill(topic, BODIES, key=b"\xff key")

    found = kafka.read(topic)
    assert [m.value() for m in found if m.partition() == 1] == BODIES[1::3]
    assert [m.offset() for m in found if m.partition() == 1] == list(range(33))
    assert {m.key() for m in found} == {b"\xff key"}
    assert kafka.watermarks(topic) == {0: (0, 34), 1: (0, 33), 2: (0, 33)}


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_are_read(kafka: KafkaServer, codec: str) -> None:
    topic = kafka.topic()

    kafka.fill(topic, BODIES, settings={"compression.type": codec})

    assert kafka.bodies(topic) == BODIES


def test_headers_tombstones_and_instants_are_kept(kafka: KafkaServer) -> None:
    topic, producer, made = kafka.topic(), kafka.producer(), an_hour_ago()
    headers: list[tuple[str, str | bytes | None]] = [("a", b"1"), ("a", b"\xff"), ("none", None)]
    producer.produce(topic, None, b"k", headers=headers, timestamp=made)
    producer.flush(30)

    [message] = kafka.read(topic)

    assert message.value() is None
    assert message.headers() == headers
    assert message.timestamp() == (confluent_kafka.TIMESTAMP_CREATE_TIME, made)


def test_a_topic_that_is_not_there_is_not_made_by_a_consumer(kafka: KafkaServer) -> None:
    with kafka.consumer() as consumer:
        found = consumer.list_topics("nowhere", timeout=30).topics["nowhere"]

    assert found.error is not None
    assert found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART


# ------------------------------------------------------------------------------- groups
def test_offsets_are_committed_without_a_member_and_with_metadata(kafka: KafkaServer) -> None:
    topic = kafka.topic(partitions=2)

    kafka.commit("outside", topic, 1, 7, "mark " + 80 * "x")

    assert kafka.committed("outside", topic) == {1: (7, "mark " + 80 * "x")}
    assert kafka.committed("nobody", topic) == {}


def test_who_is_no_member_cannot_commit_beside_one(kafka: KafkaServer) -> None:
    topic = kafka.topic()
    with kafka.member("lived in", topic), pytest.raises(KafkaException) as raised:
        kafka.commit("lived in", topic, 0, 1)

    assert raised.value.args[0].code() == KafkaError.UNKNOWN_MEMBER_ID


@on_apache_kafka
def test_a_group_tells_its_members(kafka: KafkaServer) -> None:
    topic, admin = kafka.topic(), kafka.admin()
    with kafka.member("told", topic):
        [described] = admin.describe_consumer_groups(["told"]).values()
        assert len(described.result(30).members) == 1


# ------------------------------------------------------------------------------- the log
@on_apache_kafka
def test_an_instant_is_found_in_the_log(kafka: KafkaServer) -> None:
    topic, producer, first = kafka.topic(), kafka.producer(), an_hour_ago()
    for second in range(5):
        producer.produce(topic, b"x", timestamp=first + second * 1_000)
    producer.flush(30)
    asked = [TopicPartition(topic, 0, first + 2_500), TopicPartition(topic, 0, first + 5_000)]

    with kafka.consumer() as consumer:
        [inside] = consumer.offsets_for_times(asked[:1], timeout=30)
        [behind] = consumer.offsets_for_times(asked[1:], timeout=30)

    assert (inside.offset, behind.offset) == (3, confluent_kafka.OFFSET_END)


@on_apache_kafka
def test_the_oldest_messages_can_go(kafka: KafkaServer) -> None:
    topic = kafka.topic()
    kafka.fill(topic, BODIES)

    kafka.delete_before(topic, 0, 40)

    assert kafka.watermarks(topic) == {0: (40, 100)}
    assert kafka.bodies(topic) == BODIES[40:]


@on_apache_kafka
def test_a_topic_gets_partitions_and_is_made_anew(kafka: KafkaServer) -> None:
    topic = kafka.topic()
    kafka.fill(topic, BODIES)

    kafka.add_partitions(topic, 3)
    assert kafka.partitions(topic) == [0, 1, 2]
    kafka.delete_topic(topic)
    eventually(lambda: kafka.partitions(topic) == [])
    kafka.topic(topic)

    assert kafka.watermarks(topic) == {0: (0, 0)}


@on_apache_kafka
def test_the_offsets_of_a_group_can_go(kafka: KafkaServer) -> None:
    topic = kafka.topic()
    kafka.commit("gone", topic, 0, 5)

    kafka.delete_group("gone")

    assert kafka.committed("gone", topic) == {}


# ------------------------------------------------------------------------------- transactions
@on_apache_kafka
def test_what_was_aborted_is_never_seen(kafka: KafkaServer) -> None:
    topic = kafka.topic()
    producer = kafka.producer({"transactional.id": f"{topic} a"})
    producer.init_transactions(30)
    for body, ending in (
        (b"kept", producer.commit_transaction),
        (b"aborted", producer.abort_transaction),
        (b"kept too", producer.commit_transaction),
    ):
        producer.begin_transaction()
        producer.produce(topic, body)
        producer.flush(30)
        ending(30)

    assert kafka.bodies(topic) == [b"kept", b"kept too"]


@on_apache_kafka
def test_an_open_transaction_ends_what_may_be_read(kafka: KafkaServer) -> None:
    topic = kafka.topic()
    producer = kafka.producer({"transactional.id": f"{topic} o"})
    producer.init_transactions(30)
    kafka.fill(topic, [b"before"])
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush(30)
    kafka.fill(topic, [b"behind"])

    assert kafka.bodies(topic) == [b"before"]
    producer.commit_transaction(30)
    assert kafka.bodies(topic) == [b"before", b"open", b"behind"]


# ------------------------------------------------------------------------------- the mock alone
def test_the_mock_hides_no_aborted_message(kafka_mock: MockKafka) -> None:
    """The reason why transactions are tested elsewhere."""
    topic = kafka_mock.topic()
    producer = kafka_mock.producer({"transactional.id": "t"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"aborted")
    producer.flush(30)
    producer.abort_transaction(30)

    assert kafka_mock.bodies(topic) == [b"aborted"]


def test_the_mock_fails_as_it_is_told(kafka_mock: MockKafka) -> None:
    offset_commit = 8
    topic = kafka_mock.topic()
    kafka_mock.tell(
        "push_request_errors_array", offset_commit, [KafkaError.GROUP_AUTHORIZATION_FAILED]
    )

    with pytest.raises(KafkaException) as raised:
        kafka_mock.commit("g", topic, 0, 1)

    assert raised.value.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED


def test_the_mock_ends_with_whoever_started_it(tmp_path: Path) -> None:
    server = MockKafka.start(tmp_path)
    assert server.process is not None
    assert server.process.stdin is not None

    server.process.stdin.close()

    assert server.process.wait(timeout=30) == 0


# ------------------------------------------------------------------------------- Apache Kafka alone
def test_a_transactional_producer_that_was_replaced_is_fenced(apache_kafka: ApacheKafka) -> None:
    topic = apache_kafka.topic()
    old = apache_kafka.producer({"transactional.id": f"{topic} f"})
    old.init_transactions(30)
    old.begin_transaction()
    old.produce(topic, b"of the old one")
    old.flush(30)
    new = apache_kafka.producer({"transactional.id": f"{topic} f"})
    new.init_transactions(30)

    with pytest.raises(KafkaException) as raised:
        old.commit_transaction(30)

    assert raised.value.args[0].code() in {
        KafkaError._FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.PRODUCER_FENCED,
    }
    assert apache_kafka.bodies(topic) == []


def test_apache_kafka_keeps_its_log_and_offsets_over_a_kill(tmp_path: Path) -> None:
    skip_without_apache_kafka()
    with ApacheKafka.start(tmp_path) as server:
        topic = server.topic()
        server.fill(topic, BODIES)
        server.commit("kept", topic, 0, 50, "mark")

        server.kill()
        server.run()

        assert server.bodies(topic) == BODIES
        eventually(lambda: server.committed("kept", topic) == {0: (50, "mark")})


def test_kafkas_own_tools_show_a_group(apache_kafka: ApacheKafka) -> None:
    topic = apache_kafka.topic()
    apache_kafka.fill(topic, BODIES)
    apache_kafka.commit("shown", topic, 0, 50)

    shown = apache_kafka.consumer_groups("--describe", "--group", "shown")

    assert f"shown {topic} 0 50 100 50" in " ".join(shown.split())


def test_tls_passwords_and_rights_are_checked(apache_kafka: ApacheKafka) -> None:
    topic = apache_kafka.topic()
    apache_kafka.fill(topic, BODIES)
    trusted = apache_kafka.trusted
    apache_kafka.allow("topic", topic, "read")
    apache_kafka.allow("group", "the tests", "read")

    eventually(lambda: replace(apache_kafka, settings=trusted).bodies(topic) == BODIES)
    assert "Authentication failed" in refused(apache_kafka, {**trusted, "sasl.password": "other"})
    assert "certificate verify failed" in refused(
        apache_kafka, {name: trusted[name] for name in trusted if name != "ssl.ca.location"}
    )
    refused(apache_kafka, {"bootstrap.servers": apache_kafka.secure})


def refused(server: KafkaServer, settings: Mapping[str, Any]) -> str:
    """What a client is told that does not get through."""
    told: list[str] = []
    with (
        server.consumer(
            settings={**settings, "error_cb": lambda error: told.append(error.str())}
        ) as consumer,
        pytest.raises(KafkaException),
    ):
        consumer.list_topics(timeout=2)
    return " ".join(told)


# ------------------------------------------------------------------------------- behind a proxy
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_damaged_batch_is_told_where_sums_are_checked(kafka: KafkaServer, codec: str) -> None:
    """And where they are not, it may come as it is, or never: librdkafka's default."""
    topic = kafka.topic()
    bodies = [random.Random(number).randbytes(100).hex().encode() for number in range(100)]
    kafka.fill(topic, bodies, settings={"compression.type": codec})
    with (
        KafkaProxy(kafka.bootstrap, change=damaged) as proxy,
        pytest.raises(KafkaException, match="CRC32C"),
    ):
        replace(kafka, bootstrap=proxy.bootstrap, settings={"check.crcs": True}).read(topic)


def damaged(kind: int, answer: bytes) -> bytes:
    """An answer with records, and a byte in the midst of them is another.

    One in the head of a batch can make it seem cut off, and the client asks for it for ever.
    """
    place = len(answer) // 2
    if kind != FETCH or len(answer) < 1_000:
        return answer
    return answer[:place] + bytes([answer[place] ^ 0xFF]) + answer[place + 1 :]
