"""A backfill reads exactly the messages of its interval from the log, and touches no group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.errors import ProducerError
from tests.kafka_fixtures import on_apache_kafka
from tests.kafka_group import KafkaGroup

pytestmark = pytest.mark.broker

NOON = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)
RETRY = Verdict(Action.RETRY, 0.0, "again", "process")


class Backfill(KafkaGroup):
    """Runs of one interval."""

    def __init__(self, *args: Any, minutes: tuple[float, float] = (10, 20), **options: Any) -> None:
        super().__init__(*args, **options)
        self.minutes = minutes
        self.run_id = "backfill__1"

    @contextmanager
    def source(
        self, generation: str = "", *, index: int | None = None, **options: Any
    ) -> Iterator[Any]:
        low, high = (NOON + timedelta(minutes=minute) for minute in self.minutes)
        env = self.env(generation or f"{self.run_id} {datetime.now(UTC)}", index)
        env = dataclasses.replace(
            env, interval=(low, high), owner={**env.owner, "run_id": self.run_id}
        )
        source = self.producer(**options).source(env)
        try:
            yield source
        finally:
            source.close()

    def send(self, minutes: list[float], partition: int = 0) -> None:
        """Sends a message per timestamp, in this order."""
        producer = self.kafka.producer()
        for minute in minutes:
            at = round((NOON + timedelta(minutes=minute)).timestamp() * 1000)
            producer.produce(self.topic, f"{minute:g}".encode(), partition=partition, timestamp=at)
        assert not producer.flush(30)

    def bodies(self) -> list[str]:
        return [message.data.decode() for message in self.drain()]


@on_apache_kafka
def test_exactly_the_interval_is_read_and_the_group_is_untouched(kafka, tmp_path):
    group = Backfill(kafka, tmp_path, partitions=2)
    group.send([0, 9.99, 10, 15, 19.99, 20, 30])
    group.send([5, 12, 25], partition=1)

    assert sorted(group.bodies()) == ["10", "12", "15", "19.99"]
    assert group.committed() == {}
    assert group.claims().read((group.topic, 0)) is None


@on_apache_kafka
def test_the_messages_of_an_interval_are_counted_and_none_is_read(kafka, tmp_path):
    group = Backfill(kafka, tmp_path, partitions=2, lateness=0.0)
    group.send([0, 9.99, 10, 15, 19.99, 20, 30])
    group.send([5, 12, 25], partition=1)
    low, high = (NOON + timedelta(minutes=minute) for minute in group.minutes)
    env = dataclasses.replace(group.env(""), interval=(low, high))

    assert group.producer().count_interval(env) == 4
    assert group.committed() == {}
    # And an interval that is not over is refused: its count would change later
    late = dataclasses.replace(env, interval=(low, datetime.now(UTC) + timedelta(hours=1)))
    with pytest.raises(ProducerError, match="is not over yet"):
        group.producer().count_interval(late)


@on_apache_kafka
def test_messages_with_slightly_disordered_timestamps_are_read(kafka, tmp_path):
    group = Backfill(kafka, tmp_path, lateness=300.0)
    group.send([0, 12, 22, 19, 9, 24, 15, 26, 13])

    # 26 is later than the interval by more than ``lateness``: later offsets are not read
    assert group.bodies() == ["12", "19", "15"]
    again = Backfill(kafka, tmp_path / "other", lateness=3_600.0)
    again.topic = group.topic
    assert again.bodies() == ["12", "19", "15", "13"]


@on_apache_kafka
@pytest.mark.parametrize("minutes", [(40, 50), (-50, -40)])
def test_an_interval_without_messages_is_empty(kafka, tmp_path, minutes):
    group = Backfill(kafka, tmp_path, minutes=minutes)
    group.send([0, 10, 20])

    assert group.bodies() == []


@on_apache_kafka
def test_a_backfill_and_a_live_run_hold_the_same_messages(kafka, tmp_path):
    live = KafkaGroup(kafka, tmp_path)
    group = Backfill(kafka, tmp_path)
    group.topic, group.group, group.letters = live.topic, live.group, live.letters
    group.send([10, 11, 30])
    lease, messages = live.hold(most=1)

    assert group.bodies() == ["10", "11"]
    assert live.settle(lease, messages) == SettleReport(acked=1)
    assert [m.data for m in live.drain()] == [b"11", b"30"]
    assert live.committed() == {0: 3}


@on_apache_kafka
def test_failed_messages_wait_until_the_run_is_cleared(kafka, tmp_path):
    group = Backfill(kafka, tmp_path, order="none")
    group.send([10, 11, 12])
    lease, messages = group.hold()

    report = group.settle(lease, messages, {messages[1].message_id: RETRY})

    assert report == SettleReport(acked=2, requeued=1)
    assert report.halted == 1
    # A backfill of another run is not affected
    other_run = Backfill(kafka, tmp_path, order="none")
    other_run.topic, other_run.group, other_run.run_id = group.topic, group.group, "backfill__2"
    assert len(other_run.bodies()) == 3
    # The same run, repeated, receives the remaining message
    [again] = group.drain()
    assert (again.data, again.attempt, again.redelivered) == (b"11", 2, True)
    assert group.bodies() == []


@on_apache_kafka
def test_a_cleared_run_reads_the_same_messages_again(kafka, tmp_path):
    group = Backfill(kafka, tmp_path)
    group.send([10, 11])
    assert group.bodies() == ["10", "11"]
    group.send([12])

    assert group.bodies() == []


@on_apache_kafka
def test_a_backfill_that_ended_early_fails(kafka, tmp_path):
    group = Backfill(kafka, tmp_path)
    group.send([10, 11, 12])
    lease, messages = group.hold(most=1)

    report = group.settle(lease, messages)

    assert report.errors == ("the interval was not read to its end: clear the run to go on",)
    assert report.halted == 1
    assert group.bodies() == ["11", "12"]


def test_an_unfinished_interval_is_refused(kafka_mock, tmp_path):
    group = Backfill(kafka_mock, tmp_path, minutes=(10, 60 * 24))

    with pytest.raises(ProducerError, match=r"the interval from .* is not over yet"):
        group.bodies()


@on_apache_kafka
def test_a_backfills_lease_is_settled_by_any_process(kafka, tmp_path):
    group = Backfill(kafka, tmp_path, lease=100.0)
    group.send([10, 11])
    lease, messages = group.hold()

    custodian = group.producer().custodian(group.env("another process"))
    renewed = custodian.renew(Lease.from_json(lease.to_json()))
    assert renewed is not None
    assert group.bodies() == []  # held
    assert custodian.settle(renewed, _all(messages)) == SettleReport(acked=2)
    custodian.close()


def _all(messages: Any) -> Any:
    from airflow_broadway.testing.harness import settlement_of

    return settlement_of(messages)
