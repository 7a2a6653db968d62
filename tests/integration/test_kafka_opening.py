"""Where a run begins: by table and offset, and what is refused before anything is received."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import RetryPolicy
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.admin import Admin
from airflow_broadway.producers.kafka.register import Register
from airflow_broadway.producers.kafka.source import KafkaSource
from airflow_broadway.producers.kafka.table import Table
from tests.kafka_fixtures import on_apache_kafka
from tests.kafka_group import KafkaGroup
from tests.kafka_server import ApacheKafka, KafkaServer, MockKafka
from tests.waiting import eventually

pytestmark = pytest.mark.broker

RETRY = Verdict(Action.RETRY, 0.0, "again", "process")


def offsets(messages: Any) -> list[int]:
    return [message.metadata["offset"] for message in messages]


# ------------------------------------------------------------------------------- a new group
@pytest.mark.parametrize(("policy", "expected"), [("earliest", [0, 1, 2]), ("latest", [])])
def test_a_new_group_begins_by_its_policy(
    kafka: KafkaServer, tmp_path: Path, policy: str, expected: list[int]
) -> None:
    group = KafkaGroup(kafka, tmp_path, offset_reset_policy=policy)
    group.fill(3)

    assert offsets(group.drain()) == expected
    group.fill(2)

    assert offsets(group.drain()) == [3, 4]


@on_apache_kafka
def test_a_new_group_begins_at_an_instant(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path)
    first = datetime.now(UTC) - timedelta(hours=1)
    producer = kafka.producer()
    for minute in range(5):
        at = round((first + timedelta(minutes=minute)).timestamp() * 1000)
        producer.produce(group.topic, b"x", timestamp=at)
    producer.flush(30)
    policy = (first + timedelta(seconds=150)).isoformat()

    assert offsets(group.drain(offset_reset_policy=policy)) == [3, 4]


@on_apache_kafka
def test_behind_the_last_instant_a_new_group_begins_at_the_end(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path, offset_reset_policy="2100-01-01T00:00:00Z")
    group.fill(3)

    assert group.drain() == []
    assert group.committed() == {0: 3}


def test_two_sources_that_begin_at_once_agree_where(kafka: KafkaServer, tmp_path: Path) -> None:
    # Given a new group that begins at the end
    group = KafkaGroup(kafka, tmp_path, partitions=4, offset_reset_policy="latest", concurrency=2)
    group.fill(40)

    # When the first source has opened, and committed the offsets of its partitions
    with group.source(index=0) as one, group.source(index=1) as two:
        # Then the other's partitions are no new ones
        assert group.take(one) == group.take(two) == []
        group.fill(8)
        found = [set(_partitions_of(source, 4)) for source in (one, two)]

    assert found == [{0, 2}, {1, 3}]


def _partitions_of(source: KafkaSource, number: int) -> list[int]:
    """The partitions of so many messages: each receive returns with what has come."""
    found: list[int] = []
    while len(found) < number:
        messages = source.receive(number, timeout=10.0)
        assert messages, f"only {len(found)} of {number} came"
        found += [message.metadata["partition"] for message in messages]
    return found


@on_apache_kafka
def test_a_partition_that_is_added_is_read_from_its_beginning(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path, offset_reset_policy="latest")
    group.fill(3)
    assert group.drain() == []
    kafka.add_partitions(group.topic, 2)
    eventually(lambda: kafka.partitions(group.topic) == [0, 1])
    group.fill(2, partition=1)

    assert [m.message_id for m in group.drain()] == [f"{group.topic}-1-{each}" for each in (0, 1)]


# ------------------------------------------------------------------------------- an offset is there
def test_a_plain_consumers_group_is_taken_over_where_it_is(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(5)
    kafka.commit(group.group, group.topic, 0, 3, "of somebody")

    messages = group.drain()

    assert offsets(messages) == [3, 4]
    assert not any(message.redelivered for message in messages)


def test_idle_partitions_are_committed_too(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path, partitions=3)
    group.fill(2, partition=1)

    group.drain()

    assert group.committed() == {0: 0, 1: 2, 2: 0}
    found = kafka.committed(group.group, group.topic)
    mark = json.loads(found[1][1] or "")
    assert mark.pop("s") in (3, 4)  # versions: as many as portions came
    assert mark == {"b": 1, "o": group.register().owner(), "h": 2}
    assert all(len(metadata or "") <= 90 for _, metadata in found.values())


@on_apache_kafka
def test_an_offset_that_expired_is_no_loss(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = KafkaGroup(kafka, tmp_path, offset_reset_policy="latest")
    group.drain()
    group.fill(4)
    group.drain(offset_reset_policy="latest")
    group.fill(2, start=4)
    kafka.delete_group(group.group)

    messages = group.drain()

    assert offsets(messages) == [4, 5]
    assert "has no offset for" in caplog.text
    assert group.committed() == {0: 6}


def test_a_stale_mirror_is_written_again(kafka: KafkaServer, tmp_path: Path) -> None:
    # Given a settler that died before it committed
    group = KafkaGroup(kafka, tmp_path)
    group.fill(5)
    lease, messages = group.hold()
    offset, mark = kafka.committed(group.group, group.topic)[0]
    group.settle(lease, messages)
    kafka.commit(group.group, group.topic, 0, offset, mark or "")

    assert group.drain() == []
    assert group.committed() == {0: 5}


def test_an_operators_reset_is_honoured(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(6)
    group.drain()

    kafka.commit(group.group, group.topic, 0, 2)
    back = group.drain()
    kafka.commit(group.group, group.topic, 0, 5)
    group.fill(1)
    forward = group.drain()

    assert offsets(back) == [2, 3, 4, 5]
    assert all(message.redelivered for message in back)
    assert offsets(forward) == [5, 6]
    assert [message.redelivered for message in forward] == [True, False]
    assert "was reset from 6 to 2 by somebody else: it is honoured" in caplog.text


def test_an_operators_reset_waits_for_runs_that_hold_messages(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(6)
    lease, messages = group.hold("holder")
    kafka.commit(group.group, group.topic, 0, 2)

    with pytest.raises(ProducerError, match=r"offsets were reset to 2 at .*-0, while") as raised:
        group.drain()

    assert "generation holder" in str(raised.value)
    assert lease.deadline.isoformat(timespec="seconds")[:16] in str(raised.value)
    group.settle(lease, messages)
    assert group.committed() == {0: 6}


def test_a_new_beginning_is_made_once_asked_for(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(3)
    group.drain()

    again = group.drain(begin_offset="reset")

    assert offsets(again) == [0, 1, 2]
    assert all(message.redelivered for message in again)
    assert group.drain() == []
    lease, _ = group.hold("holder", begin_offset="reset")
    with pytest.raises(ProducerError, match=r"begin_offset='reset' at .* while generation holder"):
        group.hold(begin_offset="reset")
    group.carry_out(lease, Settlement(rest=RELEASE))


# ------------------------------------------------------------------------------- refusals
def test_a_topic_that_is_not_there_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path, topics=["nowhere"], retry=RetryPolicy(dead_letter=False))

    with pytest.raises(ProducerError) as raised:
        group.drain()

    assert str(raised.value) == (
        f"the topic 'nowhere' does not exist on {kafka.bootstrap}, or Describe on it is not"
        " allowed: create it, or check the option topics"
    )
    assert kafka.partitions("nowhere") == []  # nor was it created


def test_a_dead_letter_topic_that_is_not_there_is_refused(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path, dead_letter="no-such-letters")
    group.fill(1)

    with pytest.raises(ProducerError, match="the dead-letter topic 'no-such-letters' does not ex"):
        group.drain()

    assert kafka.partitions("no-such-letters") == []
    assert len(group.drain(retry=RetryPolicy(dead_letter=False))) == 1
    group.fill(1)
    assert len(group.drain(on_failure="ack")) == 1


@on_apache_kafka
def test_a_group_with_members_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path)
    with (
        kafka.member(group.group, group.topic),
        pytest.raises(ProducerError, match=r"the group has members.*group_id of its own"),
    ):
        group.drain()


def test_a_group_of_another_staging_folder_is_refused(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path / "one")
    group.fill(3)
    group.drain()
    group.staging = f"file://{tmp_path}/two"

    with pytest.raises(ProducerError, match=r"kept by another staging folder.*kafka adopt"):
        group.drain()
    # Nor is one taken whose staging was lost
    shutil.rmtree(tmp_path / "one")
    group.staging = f"file://{tmp_path}/one"
    with pytest.raises(ProducerError, match=r"kept by another staging folder.*kafka adopt"):
        group.drain()


def test_a_run_without_staging_leaves_a_group_that_staging_takes_over(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path, order="none")
    staging, group.staging = group.staging, None
    group.fill(4)
    lease, messages = group.hold()
    group.settle(lease, messages, {messages[1].message_id: RETRY})
    group.staging = staging

    # What was finished behind a hole is known to the table alone, and comes marked
    again = group.drain()

    assert offsets(again) == [1, 2, 3]
    assert all(message.redelivered for message in again)
    # The other way round it is refused
    group.staging = None
    with pytest.raises(ProducerError, match="kept by another staging folder"):
        group.drain()


def test_a_topic_that_was_made_anew_is_refused(apache_kafka: ApacheKafka, tmp_path: Path) -> None:
    group = KafkaGroup(apache_kafka, tmp_path)
    group.fill(10)
    group.drain()
    apache_kafka.delete_topic(group.topic)
    eventually(lambda: apache_kafka.partitions(group.topic) == [])
    apache_kafka.topic(group.topic)
    group.fill(4)

    with pytest.raises(
        ProducerError, match=r"offset 10 of .*-0 is beyond the end 4: the topic was"
    ):
        group.drain()

    assert offsets(group.drain(begin_offset="reset")) == [0, 1, 2, 3]
    assert group.drain() == []


@on_apache_kafka
def test_a_compacted_topic_is_no_place_for_dead_letters(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(3)
    policy = {"cleanup.policy": "compact,delete"}
    compacted = kafka.topic(f"{group.topic}-compacted", settings=policy)

    with pytest.raises(
        ProducerError, match=r"-compacted' .* is compacted \(cleanup.policy=compact,delete\)"
    ):
        group.drain(dead_letter=compacted)

    assert offsets(group.drain()) == [0, 1, 2]


def test_a_topic_with_another_id_was_made_anew(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a cluster that names its topics by an id (no peer here does)
    group = KafkaGroup(kafka, tmp_path)
    group.fill(3)
    ids = {group.topic: "first"}
    monkeypatch.setattr(Admin, "topic_ids", lambda self, topics: ids)
    assert len(group.drain()) == 3
    assert group.table().topic_id == "first"
    group.fill(1)

    ids[group.topic] = "second"
    with pytest.raises(ProducerError, match=r"was made anew since the group .* read it"):
        group.drain()

    assert len(group.drain(begin_offset="reset")) == 4
    assert group.drain() == []
    ids.clear()  # not told any more: nothing to compare
    assert group.drain() == []


@on_apache_kafka
def test_what_retention_removed_is_told_and_left_behind(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = KafkaGroup(kafka, tmp_path, order="none")
    group.fill(10)
    lease, messages = group.hold(most=4)
    group.settle(lease, messages, {messages[2].message_id: RETRY})
    kafka.delete_before(group.topic, 0, 7)

    with pytest.raises(
        ProducerError, match=r"4 messages of .*-0 \(2–6\) were removed by retention"
    ):
        group.drain(on_expired="fail")
    with caplog.at_level(logging.ERROR), group.source() as source:
        assert offsets(group.take(source)) == [7, 8, 9]
        assert source.lease.state["set_aside"] == {"expired": 4}

    assert "4 messages of" in caplog.text
    assert group.table().base == 7


def test_a_group_that_may_not_be_written_is_refused(kafka_mock: MockKafka, tmp_path: Path) -> None:
    group = KafkaGroup(kafka_mock, tmp_path)
    group.fill(1)
    kafka_mock.tell("push_request_errors_array", 8, [30])  # OffsetCommit: GROUP_AUTHORIZATION_…

    with pytest.raises(ProducerError, match=r"the group is not allowed .*allow Read and Describe"):
        group.drain()


# ------------------------------------------------------------------------------- who died
def test_others_take_what_a_dead_run_held_half_a_minute_after_its_lease(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path, lease=100.0)
    group.fill(3)
    lease, _ = group.hold()

    group.clock.sleep(125.0)
    assert group.drain() == []
    group.clock.sleep(10.0)
    again = group.drain()

    assert offsets(again) == [0, 1, 2]
    assert all(message.redelivered and message.attempt == 1 for message in again)
    assert group.settle(lease, again).lapsed == 3
    assert group.committed() == {0: 3}


def test_versions_that_were_superseded_are_removed_after_an_hour(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path)
    folder = next(iter(_tables(group)), None)
    assert folder is None
    for _ in range(3):
        group.fill(1)
        group.drain()
    [folder] = _tables(group)
    many = len(list(folder.iterdir()))
    group.clock.sleep(3700.0)
    group.fill(1)
    group.drain()
    group.clock.sleep(3700.0)
    group.drain()

    assert many >= 7
    assert len(list(folder.iterdir())) <= 3
    assert group.drain() == []


def _tables(group: KafkaGroup) -> list[Path]:
    assert group.staging is not None
    return list(Path(group.staging.removeprefix("file://")).glob("kafka/*/tables/*/0"))


def test_a_writer_that_slept_reads_again(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(2)
    group.drain()
    place = (group.topic, 0)
    slept: Register = group.register()
    slept.read(place)
    group.fill(1)
    group.drain()
    [folder] = _tables(group)
    newest = max(folder.iterdir())
    for path in folder.iterdir():
        if path != newest:
            path.unlink()

    group.clock.sleep(700.0)

    def changed(table: Table | None) -> tuple[Table, None]:
        assert table is not None
        return dataclasses.replace(table, epoch=7), None

    slept.change(place, changed)

    assert (group.table().base, group.table().epoch) == (3, 7)
