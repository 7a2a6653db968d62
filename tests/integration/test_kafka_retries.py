"""Retries without order go to a retry topic, and are read there when they are due."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kit.generation_log import GenerationLog
from tests.kafka_fixtures import on_apache_kafka
from tests.kafka_group import KafkaGroup, offsets

pytestmark = pytest.mark.broker

RETRY = Verdict(Action.RETRY, 60.0, "ValueError: not yet", "batch")
DEAD = Verdict(Action.DEAD_LETTER, 0.0, "ValueError: no", "process")


@pytest.fixture
def group(kafka, tmp_path):
    return KafkaGroup(kafka, tmp_path, order="none")


def headers(record: Any) -> dict[str, str]:
    return {name: (value or b"").decode("utf-8", "replace") for name, value in record.headers()}


def test_a_missing_retry_topic_is_refused(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, order="none", retry_topic="no-such-retries")
    group.fill(1)

    with pytest.raises(ProducerError, match="the retry topic 'no-such-retries' does not exist"):
        group.drain()

    assert kafka.partitions("no-such-retries") == []
    assert len(group.drain(order="partition")) == 1
    group.fill(1)
    assert len(group.drain(on_failure="ack")) == 1


def test_a_retried_message_keeps_its_identity(kafka, group):
    producer, at = kafka.producer(), round(group.clock.now().timestamp() * 1000) - 60_000
    own: list[Any] = [("trace", b"\xff"), ("broadway.requeued", b"t-0-1"), ("none", None)]
    producer.produce(group.topic, b"\x00body\xff", b"\xfekey", headers=own, timestamp=at)
    producer.produce(group.topic, None, b"tombstone")
    producer.flush(30)
    lease, messages = group.hold("generation one")

    report = group.settle(lease, messages, {m.message_id: RETRY for m in messages})

    # Then the group is finished with its topic, and the copy has its origin and reason
    assert report == SettleReport(requeued=2)
    assert group.committed() == {0: 2}
    record, _ = kafka.read(group.retries)
    assert (record.value(), record.key()) == (b"\x00body\xff", b"\xfekey")
    assert record.timestamp()[1] > at
    not_before = int(headers(record)["broadway.not-before"])
    assert abs(not_before - at - 120_000) < 30_000
    assert headers(record) | {"trace": "", "broadway.not-before": ""} == {
        "trace": "",
        "broadway.requeued": "t-0-1",
        "none": "",
        "broadway.topic": group.topic,
        "broadway.partition": "0",
        "broadway.offset": "0",
        "broadway.stage": "batch",
        "broadway.reason": "ValueError: not yet",
        "broadway.group": group.group,
        "broadway.attempt": "1",
        "broadway.generation": "generation one",
        "broadway.timestamp": str(at),
        "broadway.not-before": "",
    }
    # And it is redelivered unchanged, when it is due
    assert group.drain() == []
    group.clock.sleep(61.0)
    lease, again = group.hold()
    for message, copy in zip(messages, again, strict=True):
        assert (message.message_id, message.data, dict(message.metadata), message.batch_key) == (
            *(copy.message_id, copy.data, dict(copy.metadata), copy.batch_key),
        )
        assert (copy.attempt, copy.redelivered) == (2, True)
    # A third attempt goes through the same topic; then it is a dead letter of its own topic
    group.settle(lease, again, {again[0].message_id: RETRY})
    group.clock.sleep(61.0)
    lease, [third] = group.hold()
    assert (third.attempt, third.metadata) == (3, messages[0].metadata)
    group.settle(lease, [third], {third.message_id: DEAD})
    [letter] = kafka.read(group.letters)
    values = headers(letter)
    assert letter.value() == b"\x00body\xff"
    assert values["__connect.errors.topic"] == group.topic
    assert values["__connect.errors.offset"] == "0"
    assert (values["broadway.attempt"], values["broadway.timestamp"]) == ("3", str(at))
    assert "broadway.not-before" not in values
    assert group.drain() == []


def test_a_retry_not_yet_due_blocks_only_its_retry_topic(group):
    lease, messages = group.hold(fill=6)
    later = RETRY._replace(delay=600.0)
    group.settle(lease, messages, {messages[1].message_id: later, messages[3].message_id: RETRY})
    group.fill(2, start=6)

    assert offsets(group.drain()) == [6, 7]
    group.clock.sleep(61.0)
    assert group.drain() == []  # the first in the retry topic waits for longer
    group.clock.sleep(540.0)
    assert offsets(group.drain()) == [1, 3]
    assert group.drain() == []


def test_a_waiting_run_receives_due_retries(group):
    lease, messages = group.hold(fill=2)
    group.settle(lease, messages, {messages[1].message_id: RETRY})
    with group.source() as source:
        assert source.receive(10, timeout=0.0) == []
        group.clock.sleep(61.0)

        assert offsets(source.receive(10, timeout=0.0)) == [1]


def test_released_messages_stay_in_their_topic_without_repeating_others(kafka, group):
    lease, messages = group.hold(fill=10)
    verdicts = {messages[2].message_id: RELEASE, messages[7].message_id: RELEASE}

    assert group.settle(lease, messages, verdicts) == SettleReport(acked=8, released=2)

    assert group.committed() == {0: 2}
    assert kafka.read(group.retries) == []
    assert offsets(group.drain()) == [2, 7]
    assert group.committed() == {0: 10}


def test_a_retry_copied_twice_is_handled_once(kafka, group):
    lease, messages = group.hold(fill=3)
    verdicts = {messages[1].message_id: RETRY._replace(delay=0.0)}
    group.die_settling(GenerationLog, "begin", lease, messages, verdicts)

    assert group.settle(lease, messages, verdicts) == SettleReport(acked=2, requeued=1)
    assert len(kafka.read(group.retries)) == 2
    assert offsets(group.drain()) == [1]
    assert group.drain() == []


def test_a_takeover_handles_a_message_and_its_copy_once(kafka, tmp_path):
    # Given a settlement that died after it had sent a copy, and was not repeated
    group = KafkaGroup(kafka, tmp_path, order="none", lease=100.0)
    lease, messages = group.hold(fill=3)
    verdicts = {messages[1].message_id: RETRY._replace(delay=0.0)}
    group.die_settling(GenerationLog, "begin", lease, messages, verdicts)

    group.clock.sleep(200.0)
    again = group.drain()

    assert sorted(offsets(again)) == [0, 1, 2]
    assert all(message.redelivered for message in again)
    assert group.drain() == []


def test_a_run_leaves_its_own_retries_to_the_next(group):
    group.fill(3)
    custodian = group.producer().custodian(group.env("c"))
    with group.source() as source:
        messages = group.take(source)
        now = custodian.settle_now(source.lease, [entry_of(messages[1], RETRY._replace(delay=0.0))])
        assert now == SettleReport(requeued=1)
        assert group.take(source) == []
        source.stop()
        assert group.settle(source.lease, [messages[0], messages[2]]).acked == 2
    custodian.close()

    assert offsets(group.drain()) == [1]


def test_foreign_records_in_the_retry_topic_are_ignored(kafka, group, tmp_path):
    foreign = KafkaGroup(kafka, tmp_path / "other", order="none")
    foreign.topic, foreign.retries, foreign.letters = group.topic, group.retries, group.letters
    lease, messages = group.hold(fill=2)
    group.settle(lease, messages, {messages[0].message_id: RETRY._replace(delay=0.0)})
    kafka.fill(group.retries, [b"of nobody"])

    assert offsets(foreign.drain()) == [0, 1]
    assert offsets(group.drain()) == [0]
    assert kafka.committed(foreign.group, foreign.retries)[0][0] == 2


def test_a_retry_topic_is_read_after_a_change_of_order(group):
    lease, messages = group.hold(fill=3)
    group.settle(lease, messages, {m.message_id: RETRY._replace(delay=0.0) for m in messages})

    lease, again = group.hold(order="partition")
    verdicts = {again[1].message_id: RETRY._replace(delay=0.0)}
    report = group.settle(lease, again, verdicts, order="partition")

    assert report == SettleReport(acked=1, requeued=1, released=1)
    [first, second] = group.drain(order="partition")
    assert [(m.metadata["offset"], m.attempt) for m in (first, second)] == [(1, 3), (2, 2)]


def test_a_retry_too_large_to_copy_stays_in_its_topic(apache_kafka, tmp_path):
    group = KafkaGroup(apache_kafka, tmp_path, order="none")
    apache_kafka.fill(group.topic, [b"x" * 200_000, b"small"])
    lease, messages = group.hold()
    settings = {"message.max.bytes": 100_000}
    verdicts = {m.message_id: RETRY._replace(delay=0.0) for m in messages}

    report = group.settle(lease, messages, verdicts, settings=settings)

    assert (report.requeued, report.failed) == (1, 1)
    assert (
        "a message to be retried cannot be sent" in report.errors[0]
        or "MSG_SIZE" in (report.errors[0])
    )
    again = group.drain()
    assert sorted((m.metadata["offset"], m.attempt) for m in again) == [(0, 2), (1, 2)]
    assert group.drain() == []


@on_apache_kafka
def test_retries_keep_their_partition(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, partitions=4, order="none")
    kafka.add_partitions(group.retries, 2)
    lease, messages = group.hold(fill=8)

    group.settle(lease, messages, {m.message_id: RETRY._replace(delay=0.0) for m in messages})

    partitions = {
        (r.partition(), int(headers(r)["broadway.partition"])) for r in kafka.read(group.retries)
    }
    assert partitions == {(0, 0), (1, 1), (0, 2), (1, 3)}
    assert len(group.drain()) == 8
