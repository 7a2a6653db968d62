"""What people see of a group, and what they do to it by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.group import adopt
from airflow_broadway.producers.kafka.inspect import states
from tests.kafka_group import KafkaGroup
from tests.kafka_server import KafkaServer

pytestmark = pytest.mark.broker

RETRY = Verdict(Action.RETRY, 60.0, "again", "process")


def test_a_group_is_shown_by_partition(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path, partitions=2, order="none")
    group.fill(20)
    lease, messages = group.hold(most=20)
    group.settle(lease, messages, {f"{group.topic}-0-3": RETRY})
    group.fill(6, partition=1)
    group.hold("holder", most=2)

    one, two = states(group.producer(), group.env(""))

    assert (one.start, one.base, one.end, one.committed) == (0, 3, 10, 3)
    assert (one.ready, one.delayed, one.done, one.lag, one.claims) == (0, 1, 6, 1, ())
    assert (two.base, two.end, two.ready, two.lag) == (10, 16, 4, 6)
    [held] = two.claims
    assert (held.generation, held.offsets) == ("holder", 2)
    assert held.owner["run_id"] == "manual"
    assert one.kept_by == two.kept_by == "us"
    depth = group.producer().depth(group.env(""))
    assert depth is not None
    assert depth[:4] == (4, 1, 2, 0)


def test_a_group_of_nobody_is_shown_and_not_touched(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(5)
    kafka.commit(group.group, group.topic, 0, 2)

    [state] = states(group.producer(), group.env(""))

    assert (state.kept_by, state.committed, state.base, state.ready) == ("nobody", 2, 2, 3)
    assert not list(tmp_path.iterdir())


def test_a_group_is_adopted_and_given_back(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path / "one", order="none")
    group.fill(6)
    lease, messages = group.hold()
    group.settle(lease, messages, {messages[2].message_id: Verdict(Action.RETRY)})
    group.staging = f"file://{tmp_path}/two"
    [state] = states(group.producer(), group.env(""))
    assert state.kept_by == "others"

    assert adopt(group.producer(), group.env("")) == [(group.topic, 0)]

    again = group.drain()
    assert [m.metadata["offset"] for m in again] == [2, 3, 4, 5]
    assert all(message.redelivered for message in again)
    # Back again: what the first folder knew is out of date, and goes by Kafka's offset too
    group.fill(1)
    group.staging = f"file://{tmp_path}/one"
    with pytest.raises(ProducerError, match="kept by another staging folder"):
        group.drain()
    adopt(group.producer(), group.env(""))
    assert [m.metadata["offset"] for m in group.drain()] == [6]
