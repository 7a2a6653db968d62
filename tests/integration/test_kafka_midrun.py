"""Changes of the group, the topic or the staging folder during a run."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.errors import Truncated
from tests.kafka_fixtures import on_apache_kafka
from tests.kafka_group import KafkaGroup, offsets, reset_offsets
from tests.waiting import eventually

pytestmark = pytest.mark.broker

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "ValueError: no", "process")


def body_of(letter: Any) -> str:
    return str(dict(letter.headers() or ()).get("broadway.body", b"").decode())


@on_apache_kafka
def test_a_process_that_dies_before_an_open_transaction_holds_no_later_messages(kafka, tmp_path):
    # Given ten messages, and ten of an open transaction
    group = KafkaGroup(kafka, tmp_path, lease=100.0)
    group.fill(10)
    sender = kafka.producer({"transactional.id": group.topic})
    sender.init_transactions(30)
    sender.begin_transaction()
    for _ in range(10):
        sender.produce(group.topic, b"open")
    sender.flush(30)

    # When a process dies that held the first ten
    source: Any = group.producer().source(group.env("dead"))
    assert len(group.take(source)) == 10
    source._cluster.close()
    group.clock.sleep(200.0)

    # Then the next one receives them, marked, though the readable log ends there; and the others,
    # unmarked, once the transaction is committed
    again = group.drain()
    sender.commit_transaction(30)
    after = group.drain()
    assert (len(again), all(m.redelivered for m in again)) == (10, True)
    assert (len(after), any(m.redelivered for m in after)) == (10, False)


def test_staging_lost_after_a_run_settles_and_loses_nothing(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path / "staging", order="none", lease=100.0)
    group.fill(6)
    group.drain()
    lease, messages = group.hold(fill=4)

    shutil.rmtree(tmp_path / "staging")

    assert group.settle(lease, messages) == SettleReport(lapsed=4)
    # The metadata of the offset shows that a run holds the partition, and until when
    assert group.drain() == []
    group.clock.sleep(101.0)
    again = group.drain()
    assert (offsets(again), all(m.redelivered for m in again)) == ([6, 7, 8, 9], True)
    assert group.committed() == {0: 10}


def test_staging_lost_during_a_run_loses_nothing_and_marks_all(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path / "staging", order="none", lease=100.0)
    group.fill(4)
    with group.source("g") as source:
        messages = group.take(source, 2)
        shutil.rmtree(tmp_path / "staging")
        group.fill(4, start=4)
        messages += group.take(source)
        source.stop()
        assert offsets(messages) == list(range(8))
        assert group.settle(source.lease, messages).lapsed == 8
    group.clock.sleep(101.0)
    again = group.drain()
    assert (len(again), {m.redelivered for m in again}) == (8, {True})


def recreate_topic(group: KafkaGroup, count: int) -> None:
    kafka = group.kafka
    kafka.delete_topic(group.topic)
    eventually(lambda: kafka.partitions(group.topic) == [])
    kafka.topic(group.topic)
    kafka.fill(group.topic, [b"other"] * count)


def test_a_topic_recreated_after_a_run_is_detected_at_settlement(apache_kafka, tmp_path):
    group = KafkaGroup(apache_kafka, tmp_path)
    lease, messages = group.hold(fill=10)

    recreate_topic(group, 4)
    report = group.settle(lease, messages, {messages[2].message_id: DEAD})

    # Then handled messages are finished, and no dead letter has another message's body
    assert (report.acked, report.dead_lettered, report.total) == (9, 1, 10)
    assert "was created again while a run held messages" in report.errors[0]
    assert group.committed() == {}
    [letter] = apache_kafka.read(group.letters)
    assert (letter.value(), body_of(letter)) == (None, "deleted: the topic was created again")
    # And no run reads the new topic as if it were the old one
    with pytest.raises(ProducerError, match="was created again since the group"):
        group.drain()
    reset_offsets(group, "--to-earliest")
    assert len(group.drain()) == 4


def test_a_recreated_topic_is_detected_by_its_id(kafka, group, monkeypatch):
    group.fill(3)
    ids = {group.topic: "first"}
    monkeypatch.setattr(Cluster, "topic_ids", lambda self, topics: ids)
    lease, messages = group.hold()

    ids[group.topic] = "second"
    group.settle(lease, messages, {messages[1].message_id: DEAD})

    [letter] = kafka.read(group.letters)
    assert (letter.value(), body_of(letter)) == (None, "deleted: the topic was created again")
    with pytest.raises(ProducerError, match="was created again since the group"):
        group.drain()


def test_a_topic_recreated_during_a_run_ends_it(apache_kafka, tmp_path):
    group = KafkaGroup(apache_kafka, tmp_path)
    group.fill(10)
    with group.source() as source:
        assert len(group.take(source)) == 10
        recreate_topic(group, 4)

        with pytest.raises(Truncated, match="the topic was created again, or lost its tail"):
            eventually(lambda: source.receive(5, timeout=1.0))
