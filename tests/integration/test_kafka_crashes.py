"""A message of which processes die: found in a few runs, and set aside; the others are handled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.kafka import partition as partition_module
from airflow_broadway.producers.kafka.source import KafkaSource
from airflow_broadway.producers.kafka.table import Crash, blame
from airflow_broadway.testing.harness import settlement_of
from tests.kafka_group import KafkaGroup
from tests.kafka_server import MockKafka

pytestmark = pytest.mark.broker


def crash(source: KafkaSource) -> None:
    """As ``kill -9``: nothing is said to anybody."""
    source._cluster.close()


class Runs:
    """Runs of which each dies when it has received a poisonous message, and settles otherwise.

    :param by_sweep: Whether somebody settles what a dead run held; else its lease lapses.
    """

    def __init__(self, group: KafkaGroup, poison: set[str], *, by_sweep: bool) -> None:
        self.group = group
        self.poison = poison
        self.by_sweep = by_sweep
        self.handled: list[str] = []
        self.deaths = 0
        self.sizes: list[int] = []

    def one(self) -> int:
        """One run; how many messages it handled."""
        source = self.group.producer().source(self.group.env(f"g{len(self.sizes)}"))
        assert isinstance(source, KafkaSource)
        messages: list[Message] = []
        opened, died = source.lease, False
        while found := source.receive(1_000, timeout=0.0):
            messages += found
            if {message.message_id for message in found} & self.poison:
                died = True
                break
        self.sizes.append(len(messages))
        if died:
            self.deaths += 1
            crash(source)
            if self.by_sweep:
                self.group.carry_out(opened, Settlement(rest=RELEASE))
            else:
                self.group.clock.sleep(200.0)
            return 0
        source.stop()
        lease = source.lease
        source.close()
        self.group.settle(lease, messages)
        self.handled += [message.message_id for message in messages]
        return len(messages)

    def until_all_is_done(self, total: int, most: int) -> None:
        for _ in range(most):
            self.one()
            if len(self.handled) + len(self.poison) == total and not self.lag():
                return
        raise AssertionError(f"{len(self.handled)} of {total} after {most} runs")

    def lag(self) -> int:
        depth = self.group.producer().depth(self.group.env("depth"))
        assert depth is not None
        return depth.ready


@pytest.mark.parametrize("by_sweep", [True, False])
@pytest.mark.parametrize("order", ["partition", "none"])
def test_one_of_five_thousand_messages_is_found_and_set_aside(
    kafka_mock: MockKafka, tmp_path: Path, order: str, by_sweep: bool
) -> None:
    group = KafkaGroup(kafka_mock, tmp_path, lease=100.0, order=order)
    group.fill(5_000)
    poison = f"{group.topic}-0-3333"
    runs = Runs(group, {poison}, by_sweep=by_sweep)

    runs.until_all_is_done(5_000, most=60)

    assert len(set(runs.handled)) == 4_999
    assert poison not in runs.handled
    assert runs.deaths <= 8
    [letter] = group.kafka.read(group.letters)
    headers: dict[str, Any] = dict(letter.headers() or ())
    assert letter.value() == b"003333"
    assert headers["__connect.errors.exception.message"].startswith(b"its process died")
    assert headers["__connect.errors.exception.class.name"] == b"crashed"
    assert headers["broadway.again"] == b"1"
    assert group.table().crashes == ()


def test_a_poisonous_message_does_not_keep_other_partitions_waiting(
    kafka_mock: MockKafka, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka_mock, tmp_path, partitions=3, lease=100.0)
    group.fill(3_000)
    runs = Runs(group, {f"{group.topic}-1-500"}, by_sweep=True)

    runs.until_all_is_done(3_000, most=60)

    assert len(set(runs.handled)) == 2_999
    assert [letter.value() for letter in kafka_mock.read(group.letters)] == [b"001501"]


@pytest.mark.parametrize("by_sweep", [True, False])
@pytest.mark.parametrize("partitions", [1, 2])
def test_what_was_claimed_last_beside_others_was_not_alone(
    kafka_mock: MockKafka, tmp_path: Path, partitions: int, by_sweep: bool
) -> None:
    # Given a process that takes one message, and another while it handles the first
    group = KafkaGroup(kafka_mock, tmp_path, lease=100.0, partitions=partitions, order="none")
    group.fill(2)
    source = group.producer().source(group.env("g0"))
    assert isinstance(source, KafkaSource)
    opened = source.lease
    for _ in range(2):
        assert len(source.receive(1, timeout=5.0)) == 1

    # When it dies
    crash(source)
    if by_sweep:
        group.carry_out(opened, Settlement(rest=RELEASE))
    else:
        group.clock.sleep(200.0)
        group.producer().source(group.env("g1")).close()

    # Then nobody says that one of the two was alone
    tables = [group.table(number) for number in range(partitions)]
    assert [each.alone for table in tables for each in table.crashes] == [False]


def test_what_nobody_handled_is_never_set_aside(kafka_mock: MockKafka, tmp_path: Path) -> None:
    # Given runs that die whatever they hold, as where a machine has no memory left
    group = KafkaGroup(kafka_mock, tmp_path, lease=100.0, partitions=2)
    group.fill(40)
    every = {f"{group.topic}-{p}-{n}" for p in (0, 1) for n in range(20)}
    runs = Runs(group, every, by_sweep=True)
    for _ in range(4):
        runs.one()
    runs.poison = set()

    for _ in range(20):
        runs.one()

    assert len(set(runs.handled)) == 40
    assert kafka_mock.read(group.letters) == []


def test_a_run_that_ends_as_it_should_is_no_crash(kafka_mock: MockKafka, tmp_path: Path) -> None:
    group = KafkaGroup(kafka_mock, tmp_path, lease=100.0)
    group.fill(10)
    with group.source() as source:
        group.take(source)
        opened = source.lease
    # Its manifest was never published: a full disk, say
    group.carry_out(opened, Settlement(rest=RELEASE))
    group.hold()
    group.clock.sleep(200.0)
    group.drain()

    assert group.table().crashes == ()


def test_a_crash_is_the_claim_that_was_last_in_any_partition(
    kafka_mock: MockKafka, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka_mock, tmp_path, partitions=2, lease=100.0)
    group.fill(5, partition=0)
    source = group.producer().source(group.env("g"))
    assert isinstance(source, KafkaSource)
    group.take(source)
    group.fill(5, partition=1)
    while not source.receive(10, timeout=1.0):
        pass
    crash(source)
    group.clock.sleep(200.0)

    with group.source():
        assert group.table(0).crashes == ()
        assert group.table(1).crashes == (Crash(0, 5, 1),)
        assert group.table(0).marks == group.table(1).marks == ((0, 5),)


def test_what_is_suspect_is_in_nobodys_hands_beside_anything_else(
    kafka_mock: MockKafka, tmp_path: Path
) -> None:
    # Given one partition of which two processes have died
    group = KafkaGroup(kafka_mock, tmp_path, partitions=2, lease=100.0)
    group.fill(600, partition=1)
    group.drain()
    group.fill(600, partition=1)

    def blamed(table: Any) -> Any:
        return blame(blame(table, (600, 1_200)), (600, 1_200)), None

    group.register().change((group.topic, 1), blamed)
    group.fill(5, partition=0)

    runs = [group.drain() for _ in range(5)]

    # Then runs take turns: all but that, and a portion of that alone
    assert [{m.metadata["partition"] for m in each} for each in runs] == [{0}, *[{1}] * 3, set()]
    assert [len(each) for each in runs] == [5, 250, 250, 100, 0]


@pytest.mark.parametrize("order", ["partition", "key"])
def test_what_is_suspect_waits_for_what_is_before_it(
    kafka_mock: MockKafka, tmp_path: Path, order: str
) -> None:
    # Given a suspect with messages before it, and a run that ended before it came to try it
    group = KafkaGroup(kafka_mock, tmp_path, order=order)
    group.fill(40)
    group.drain()
    group.fill(40)

    def blamed(table: Any) -> Any:
        return blame(blame(table, (60, 70)), (60, 70)), None

    group.register().change((group.topic, 0), blamed)
    group.settle(*group.hold(most=10))
    assert group.table().skipped

    handled: list[int] = []
    while len(handled) < 30:
        lease, messages = group.hold(most=10)
        group.settle(lease, messages)
        handled += [int(message.metadata["offset"]) for message in messages]

    assert handled == list(range(50, 80))


def test_what_cannot_be_set_aside_stays_and_is_told(
    kafka_mock: MockKafka, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from airflow_broadway import RetryPolicy

    group = KafkaGroup(
        kafka_mock,
        tmp_path,
        lease=100.0,
        dead_letter="nowhere-at-all",
        retry=RetryPolicy(dead_letter=False),
    )
    group.fill(1)
    runs = Runs(group, {f"{group.topic}-0-0"}, by_sweep=True)

    for _ in range(6):
        runs.one()

    assert (
        "what crashed its processes stays there: there is no topic 'nowhere-at-all'" in caplog.text
    )
    assert group.table().base == 0


def test_a_partition_with_ten_thousand_holes_gets_no_new_ones(
    kafka_mock: MockKafka,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(partition_module, "_MOST_HOLES", 10)
    group = KafkaGroup(kafka_mock, tmp_path, order="none")
    group.fill(40)
    lease, messages = group.hold(most=30)
    retry = Verdict(Action.RETRY, 60.0, "again", "process")
    group.settle(lease, messages, {m.message_id: retry for m in messages[::2]})

    assert group.drain() == []
    assert f"{group.topic}-0 has 15 holes" in caplog.text
    group.clock.sleep(61.0)
    again: list[Any] = group.drain()
    assert [m.metadata["offset"] for m in again] == list(range(0, 30, 2))
    assert len(group.drain()) == 10


@pytest.mark.parametrize("order", ["none", "key", "partition"])
def test_one_of_a_thousand_that_kills_its_batch_is_found_over_runs(
    kafka_mock: MockKafka, tmp_path: Path, order: str
) -> None:
    # Given runs that publish what they received, of which every second message is in a batch
    group = KafkaGroup(kafka_mock, tmp_path, lease=100.0, order=order)
    group.fill(1_000)
    poison = f"{group.topic}-0-333"
    handled: set[str] = set()
    deaths = runs = 0

    # When the batch with one of them dies each time
    while len(handled) < 999 or not kafka_mock.read(group.letters):
        lease, messages = group.hold()
        runs += 1
        assert runs <= 30
        batches = [[each.message_id for each in messages[first::2]] for first in (0, 1)]
        died = next((batch for batch in batches if poison in batch), [])
        others = [key for batch in batches for key in batch if batch is not died]
        settlement = settlement_of(messages, dict.fromkeys(others, ACK), RELEASE)
        group.carry_out(lease, replace(settlement, died=frozenset(died)))
        handled.update(others)
        deaths += bool(died)

    # Then it is set aside at last, and the others are handled
    assert deaths == 7
    assert poison not in handled
    [letter] = kafka_mock.read(group.letters)
    assert letter.value() == b"000333"
    assert group.drain() == []
    assert group.table().crashes == ()
