"""Checks and depths of a group."""

from __future__ import annotations

import pytest

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.custody.verdicts import Action, Verdict
from tests.kafka_fixtures import on_apache_kafka
from tests.kafka_group import KafkaGroup
from tests.waiting import eventually

pytestmark = pytest.mark.broker

RETRY = Verdict(Action.RETRY, 60.0, "again", "process")


def depth(group: KafkaGroup) -> QueueDepth:
    queue_depth = group.producer().depth(group.env(""))
    assert queue_depth is not None
    return queue_depth


def test_depth_splits_the_backlog_by_state(kafka, tmp_path):
    # Given a partition that is finished but for one message that is retried, and one that is held
    group = KafkaGroup(kafka, tmp_path, partitions=2, order="none")
    lease, messages = group.hold(most=20, fill=20)
    group.settle(lease, messages, {f"{group.topic}-0-3": RETRY})
    group.fill(6, partition=1)
    group.hold("holder", most=2)

    assert group.committed() == {0: 10, 1: 10}
    [(level, text)] = [
        finding for finding in group.producer().check(group.env("")) if "is held" in finding.text
    ]
    assert level == "note"
    assert text.startswith(f"{group.topic}-1 is held until ")
    assert text.endswith(" by the run flights manual: other runs leave it alone.")
    assert depth(group)[:4] == (0, 1, 6, 0)
    group.clock.sleep(61.0)
    assert depth(group)[:4] == (1, 0, 6, 0)


def test_depth_counts_messages_behind_a_retry_as_delayed(group):
    lease, messages = group.hold(fill=10)
    group.settle(lease, messages, {f"{group.topic}-0-3": RETRY})

    assert group.committed() == {0: 3}
    assert depth(group)[:4] == (0, 7, 0, 0)
    group.clock.sleep(61.0)
    assert depth(group)[:4] == (7, 0, 0, 0)


def test_oldest_age_is_that_of_the_timestamp(kafka, tmp_path):
    # Given two partitions, whose first messages are finished, held by a run, or wait to be retried
    group = KafkaGroup(kafka, tmp_path, partitions=2, order="none")
    now = group.clock.now().timestamp()

    def send(age: float, partition: int) -> None:
        sender = kafka.producer()
        sender.produce(group.topic, b"x", partition=partition, timestamp=round((now - age) * 1000))
        assert not sender.flush(30)

    send(9000.0, 0)
    send(8000.0, 1)
    assert depth(group).oldest_age == pytest.approx(9000.0, abs=60.0)
    lease, messages = group.hold()
    group.settle(lease, messages, {f"{group.topic}-1-0": RETRY})
    assert depth(group).oldest_age is None  # no message that a run could receive
    send(7000.0, 0)
    group.hold()

    # Then it is the age of the first of the others
    send(5000.0, 0)
    send(4000.0, 1)
    assert depth(group).oldest_age == pytest.approx(5000.0, abs=60.0)
    group.clock.sleep(61.0)
    assert depth(group).oldest_age == pytest.approx(8061.0, abs=60.0)


@on_apache_kafka
def test_aborted_messages_have_no_age(kafka, group):
    sender = kafka.producer({"transactional.id": group.topic})
    sender.init_transactions(30)
    sender.begin_transaction()
    sender.produce(group.topic, b"x")
    sender.flush(30)
    sender.abort_transaction(30)

    eventually(lambda: depth(group).ready > 0)  # the coordinator answers before its marker is there
    assert depth(group).oldest_age is None


def test_the_depth_of_an_unused_group_is_counted_without_touching_it(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, partitions=2)
    group.fill(5)
    assert depth(group).ready == 5
    group.options["offset_reset_policy"] = "latest"
    assert depth(group).ready == 0
    kafka.commit(group.group, group.topic, 0, 2)

    assert depth(group).ready == 1 + 2
    assert not list(tmp_path.iterdir())
