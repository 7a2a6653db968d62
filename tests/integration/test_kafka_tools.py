"""Kafka's own tools on a group, during runs and after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.claims import Committed
from tests.kafka_group import KafkaGroup, offsets, reset_offsets
from tests.kafka_server import ApacheKafka

pytestmark = pytest.mark.broker

RETRY = Verdict(Action.RETRY, 60.0, "again", "process")


class Row(NamedTuple):
    """A partition's row of ``kafka-consumer-groups --describe``."""

    offset: str
    end: str
    lag: str


def describe_group(group: KafkaGroup) -> dict[tuple[str, int], Row]:
    kafka = group.kafka
    assert isinstance(kafka, ApacheKafka)
    output = kafka.consumer_groups("--describe", "--group", group.group)
    rows = [line.split() for line in output.splitlines() if line.startswith(group.group)]
    return {(row[1], int(row[2])): Row(*row[3:6]) for row in rows}


def stopped_group(kafka: ApacheKafka, folder: Path, count: int, at: int) -> KafkaGroup:
    """Returns a group of one ordered partition that has stopped at a message to retry."""
    group = KafkaGroup(kafka, folder)
    group.fill(count)
    lease, messages = group.hold()
    group.settle(lease, messages, {messages[at].message_id: RETRY})
    return group


def test_describe_shows_offsets_and_lag_during_and_after_runs(apache_kafka, tmp_path):
    group = KafkaGroup(apache_kafka, tmp_path, partitions=2, order="none")
    lease, messages = group.hold(fill=20)

    during = describe_group(group)
    report = group.settle(lease, messages, {messages[3].message_id: RETRY})
    after = describe_group(group)

    assert report == SettleReport(acked=19, requeued=1)
    assert during[group.topic, 0] == during[group.topic, 1] == ("0", "10", "10")
    assert after[group.topic, 0] == after[group.topic, 1] == ("10", "10", "0")
    assert after[group.retries, 0] == ("0", "1", "1")
    group.clock.sleep(61.0)
    group.drain()
    assert describe_group(group)[group.retries, 0] == ("1", "1", "0")


def test_describe_shows_where_an_ordered_partition_stopped(apache_kafka, tmp_path):
    group = stopped_group(apache_kafka, tmp_path, 10, at=4)

    assert describe_group(group) == {(group.topic, 0): ("4", "10", "6")}


def test_reset_offsets_works_between_runs(apache_kafka, tmp_path, caplog):
    group = KafkaGroup(apache_kafka, tmp_path)
    group.fill(10)
    group.drain()

    reset_offsets(group, "--to-offset", "4")
    assert describe_group(group)[group.topic, 0] == ("4", "10", "6")
    back = group.drain()
    assert (offsets(back), {m.redelivered for m in back}) == ([*range(4, 10)], {True})
    assert "was reset from 10 to 4 by another program: it is honoured" in caplog.text

    group.fill(6, start=10)
    reset_offsets(group, "--to-latest")
    assert group.drain() == []
    reset_offsets(group, "--shift-by", "-2")
    assert [(m.metadata["offset"], m.redelivered) for m in group.drain()] == [
        *((14, False), (15, False))
    ]
    reset_offsets(group, "--to-earliest")
    assert offsets(group.drain()) == list(range(16))


def test_attempts_restart_after_a_reset(apache_kafka, tmp_path):
    group = stopped_group(apache_kafka, tmp_path, 4, at=2)

    reset_offsets(group, "--to-earliest")

    assert [(m.metadata["offset"], m.attempt) for m in group.drain()] == [
        *((0, 1), (1, 1), (2, 1), (3, 1))
    ]


def test_a_foreign_consumer_in_the_group_is_reported_at_settlement(apache_kafka, tmp_path):
    # Given a run that holds messages, and a consumer that joins its group: the group rebalances
    group = KafkaGroup(apache_kafka, tmp_path, lease=100.0)
    lease, messages = group.hold(fill=5)
    with apache_kafka.member(group.group, group.topic):
        with pytest.raises(ProducerError, match="the group has members, which consume next to"):
            group.settle(lease, messages)
        # Nor does another run begin
        with pytest.raises(ProducerError, match=r"has 1 member \("):
            group.drain()
        assert group.committed() == {0: 0}

    # Then the decision is carried out once it has left
    assert group.settle(lease, messages) == SettleReport(acked=5)
    assert group.committed() == {0: 5}


def test_a_marker_is_small_and_contains_no_secret(apache_kafka, tmp_path):
    group = KafkaGroup(apache_kafka, tmp_path)
    lease, messages = group.hold(fill=5)

    [(offset, held)] = apache_kafka.committed(group.group, group.topic).values()
    group.settle(lease, messages)
    [(after, free)] = apache_kafka.committed(group.group, group.topic).values()

    assert (offset, after) == (0, 5)
    mark = Committed.read(0, held or "")
    assert (mark.owner != "", mark.high, mark.until > 0) == (True, 5, True)
    assert json.loads(free or "").keys() == {"b", "o", "h"}
    assert len(held or "") <= 90
