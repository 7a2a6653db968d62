"""Where a run begins: by table and offset, and what is refused before anything is received."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import RetryPolicy
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.source import KafkaSource
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


def test_idle_partitions_are_committed_once_too(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path, partitions=3)
    group.fill(2, partition=1)

    group.drain()

    assert group.committed() == {0: 0, 1: 2, 2: 0}
    found = kafka.committed(group.group, group.topic)
    assert json.loads(found[1][1] or "") == {"b": 2, "o": group.claims().owner(), "h": 2}
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


def test_a_late_commit_of_an_earlier_run_brings_messages_again_marked(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a settler that slept between its last look and its commit, until others had gone on
    group = KafkaGroup(kafka, tmp_path)
    group.fill(5)
    lease, messages = group.hold(most=2)
    group.settle(lease, messages)
    offset, mark = kafka.committed(group.group, group.topic)[0]
    group.drain()
    kafka.commit(group.group, group.topic, 0, offset, mark or "")

    again = group.drain()

    assert (offsets(again), {m.redelivered for m in again}) == ([2, 3, 4], {True})
    assert "went back from 5 to 2 by a commit of an earlier run that came late" in caplog.text
    assert "another program" not in caplog.text
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
    assert "was reset from 6 to 2 by another program: it is honoured" in caplog.text


def test_a_reset_while_a_run_holds_messages_counts_and_what_it_held_has_lapsed(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(6)
    group.drain()
    group.fill(4)
    lease, messages = group.hold("holder")
    kafka.commit(group.group, group.topic, 0, 2)
    assert group.drain() == []  # the run holds the partition

    report = group.settle(lease, messages)

    assert (report.acked, report.lapsed) == (0, 4)
    assert (
        "was reset from 6 to 2 while a run held its messages: the reset counts"
        in (report.errors[0])
    )
    again = group.drain()
    assert (offsets(again), {m.redelivered for m in again}) == ([*range(2, 10)], {True})
    assert group.committed() == {0: 10}


def test_a_reset_counts_though_the_run_claims_more_after_it(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = KafkaGroup(kafka, tmp_path)
    monkeypatch.setattr("airflow_broadway.producers.kafka.reader._AHEAD_FIRST", 10)
    group.fill(6)
    group.drain()
    group.fill(30, start=6)
    with group.source("holder") as source:
        messages = group.take(source, 5)
        kafka.commit(group.group, group.topic, 0, 2)
        messages += group.take(source)
        source.stop()
        report = group.settle(source.lease, messages)

    assert (report.acked, report.lapsed) == (0, 30)
    assert "was reset from 6 to 2 while a run held its messages" in report.errors[0]
    assert offsets(group.drain()) == list(range(2, 36))


def test_a_late_commit_while_a_run_holds_messages_is_no_reset(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(5)
    group.drain()
    offset, mark = kafka.committed(group.group, group.topic)[0]
    group.fill(4)
    group.drain()
    group.fill(3)
    lease, messages = group.hold()
    kafka.commit(group.group, group.topic, 0, offset, mark or "")

    report = group.settle(lease, messages)

    assert (report.acked, report.lapsed) == (0, 3)
    assert "went from 9 to 5 by a late commit of an earlier run" in report.errors[0]
    again = group.drain()
    assert (offsets(again), {m.redelivered for m in again}) == ([*range(5, 12)], {True})


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
        pytest.raises(ProducerError, match=r"has 1 member \(.*group_id of its own"),
    ):
        group.drain()


def test_another_staging_folder_goes_on_where_the_group_is(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    group = KafkaGroup(kafka, tmp_path / "one")
    group.fill(3)
    group.drain()
    group.fill(2)
    group.staging = f"file://{tmp_path}/two"

    messages = group.drain()

    assert offsets(messages) == [3, 4]
    assert not any(message.redelivered for message in messages)


def test_what_a_run_with_another_staging_folder_holds_is_left_alone_until_its_lease_is_over(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = KafkaGroup(kafka, tmp_path / "one", lease=100.0)
    group.fill(3)
    lease, held = group.hold()
    group.staging = f"file://{tmp_path}/two"

    assert group.drain() == []

    assert "is held until" in caplog.text
    assert "by a run with another staging folder" in caplog.text
    group.clock.sleep(101.0)
    again = group.drain()
    assert (offsets(again), {m.redelivered for m in again}) == ([0, 1, 2], {True})
    # The first run settles nothing of what the other has finished
    group.staging = f"file://{tmp_path}/one"
    report = group.settle(lease, held)
    assert report.lapsed == 3
    assert "has taken over" in report.errors[0]
    assert group.committed() == {0: 3}


def test_two_staging_folders_that_begin_a_group_together_handle_each_message_once(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    # Given two that have opened before either has claimed anything
    one = KafkaGroup(kafka, tmp_path / "one")
    one.fill(300)
    two = KafkaGroup(kafka, tmp_path / "two")
    two.topic, two.letters, two.group = one.topic, one.letters, one.group
    with one.source("first") as first, two.source("second") as second:
        # When both receive
        found = [one.take(first), two.take(second)]
        first.stop()
        second.stop()
        reports = [one.settle(first.lease, found[0]), two.settle(second.lease, found[1])]

    # Then the group's offset, which both commit with their marks, has decided
    assert [len(messages) for messages in found] == [300, 0]
    assert [report.acked for report in reports] == [300, 0]
    assert two.drain() == []


def two_staging_folders(kafka: KafkaServer, folder: Path) -> tuple[KafkaGroup, KafkaGroup]:
    """Two users of one group, each with a staging folder of its own; 30 of 60 messages are read."""
    one = KafkaGroup(kafka, folder / "one")
    one.fill(30)
    one.drain()
    one.fill(30)
    two = KafkaGroup(kafka, folder / "two")
    two.topic, two.letters, two.group = one.topic, one.letters, one.group
    return one, two


def test_of_two_staging_folders_that_claim_in_the_same_moment_the_last_commit_counts(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = two_staging_folders(kafka, tmp_path)
    with one.source("first") as first, two.source("second") as second:
        # Given one that commits its claim when the other has looked, and not committed yet
        committed = Cluster.commit
        taken: list[Any] = []

        def late(self: Cluster, offsets: Any) -> None:
            if self is first._cluster and not taken:
                taken.extend(two.take(second))
            committed(self, offsets)

        monkeypatch.setattr(Cluster, "commit", late)
        found = one.take(first)
        monkeypatch.undo()
        first.stop()
        second.stop()
        reports = [one.settle(first.lease, found), two.settle(second.lease, taken)]

    # Then both have handled the messages; one of the two says so
    assert (len(found), len(taken)) == (30, 30)
    assert [(report.acked, report.lapsed) for report in reports] == [(30, 0), (0, 30)]
    assert "a run with another staging folder" in reports[1].errors[0]
    assert one.committed() == {0: 60}


def test_of_two_staging_folders_the_one_whose_commit_was_overtaken_hands_out_nothing(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two that have both looked when the first commits its claim
    one, two = two_staging_folders(kafka, tmp_path)
    committed, looked, may_commit = Cluster.commit, threading.Event(), threading.Event()
    with one.source("first") as first, two.source("second") as second:
        taken: list[Any] = []
        other = threading.Thread(target=lambda: taken.extend(two.take(second)))

        def commit(self: Cluster, offsets: Any) -> None:
            if self is second._cluster:
                looked.set()
                assert may_commit.wait(60)
                committed(self, offsets)
                return
            if not other.ident:
                other.start()
                assert looked.wait(60)
            committed(self, offsets)
            may_commit.set()
            other.join(60)

        # When the other commits before the first looks again
        monkeypatch.setattr(Cluster, "commit", commit)
        found = one.take(first)
        monkeypatch.undo()

    # Then one of the two has the messages
    assert (len(found), len(taken)) == (0, 30)


def test_a_staging_folder_that_was_restored_from_an_older_copy_loses_and_repeats_nothing(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a copy of the staging folder, and runs after it; of the last nobody has settled anything
    group = KafkaGroup(kafka, tmp_path / "staging", lease=100.0)
    group.fill(50)
    group.drain()
    shutil.copytree(tmp_path / "staging", tmp_path / "copy")
    group.fill(50, start=50)
    group.drain()
    group.fill(100, start=100)
    group.hold("dies")

    shutil.rmtree(tmp_path / "staging")
    shutil.copytree(tmp_path / "copy", tmp_path / "staging")
    group.fill(10, start=200)
    group.clock.sleep(200.0)
    again = group.drain()

    # Then the offset in Kafka counts, and its mark tells what was handed out
    assert offsets(again) == list(range(100, 210))
    assert [m.redelivered for m in again] == [True] * 100 + [False] * 10
    assert "staging knows of 50: it is older, or was restored" in caplog.text


def test_what_a_run_without_staging_has_finished_stands(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path)
    staging, group.staging = group.staging, None
    group.fill(4)
    lease, messages = group.hold()
    group.settle(lease, messages, {messages[1].message_id: RETRY})
    group.staging = staging

    again = group.drain()

    assert offsets(again) == [1, 2, 3]
    assert all(message.redelivered for message in again)


def test_a_topic_that_was_made_anew_is_refused(apache_kafka: ApacheKafka, tmp_path: Path) -> None:
    group = KafkaGroup(apache_kafka, tmp_path)
    group.fill(10)
    group.drain()
    apache_kafka.delete_topic(group.topic)
    eventually(lambda: apache_kafka.partitions(group.topic) == [])
    apache_kafka.topic(group.topic)
    group.fill(4)

    with pytest.raises(
        ProducerError, match=r"was created again since the group .* read it: .*--reset-offsets"
    ):
        group.drain()

    apache_kafka.consumer_groups(
        *("--group", group.group, "--topic", group.topic),
        *("--reset-offsets", "--to-earliest", "--execute"),
    )
    assert offsets(group.drain()) == [0, 1, 2, 3]
    assert group.drain() == []


def test_a_topic_that_was_made_anew_before_anything_was_finished_starts_over_by_a_reset(
    apache_kafka: ApacheKafka, tmp_path: Path
) -> None:
    # Given a claim that begins where the group is reset to
    group = KafkaGroup(apache_kafka, tmp_path)
    group.fill(3)
    lease, _ = group.hold()
    group.carry_out(lease, Settlement(rest=RELEASE))
    assert group.committed() == {0: 0}
    apache_kafka.delete_topic(group.topic)
    eventually(lambda: apache_kafka.partitions(group.topic) == [])
    apache_kafka.topic(group.topic)
    group.fill(2)
    with pytest.raises(
        ProducerError, match=r"was created again since .*--reset-offsets starts over"
    ):
        group.drain()

    apache_kafka.consumer_groups(
        *("--group", group.group, "--topic", group.topic),
        *("--reset-offsets", "--to-earliest", "--execute"),
    )

    assert offsets(group.drain()) == [0, 1]
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


@on_apache_kafka
def test_a_compacted_topic_is_no_place_for_retries(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path, order="none")
    group.fill(3)
    compacted = kafka.topic(f"{group.topic}-compacted", settings={"cleanup.policy": "compact"})

    with pytest.raises(
        ProducerError, match=r"the retry topic '.*-compacted' .* \(cleanup.policy=compact\): of"
    ):
        group.drain(retry_topic=compacted)

    assert offsets(group.drain()) == [0, 1, 2]


def test_a_topic_with_another_id_was_made_anew(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a cluster that names its topics by an id (no peer here does)
    group = KafkaGroup(kafka, tmp_path)
    group.fill(3)
    ids = {group.topic: "first"}
    monkeypatch.setattr(Cluster, "topic_ids", lambda self, topics: ids)
    assert len(group.drain()) == 3
    assert group.claim().topic_id == "first"
    group.fill(1)

    ids[group.topic] = "second"
    with pytest.raises(ProducerError, match=r"was created again since the group .* read it"):
        group.drain()

    kafka.commit(group.group, group.topic, 0, 0)  # kafka-consumer-groups --reset-offsets
    assert len(group.drain()) == 4
    assert group.drain() == []
    ids.clear()  # not told any more: nothing to compare
    assert group.drain() == []


@on_apache_kafka
def test_what_retention_removed_is_told_and_left_behind(
    kafka: KafkaServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = KafkaGroup(kafka, tmp_path)
    group.fill(10)
    lease, messages = group.hold(most=4)
    group.settle(lease, messages, {messages[2].message_id: RETRY})
    kafka.delete_before(group.topic, 0, 7)

    with pytest.raises(
        ProducerError, match=r"5 messages of .*-0 \(2–6\) were removed by retention"
    ):
        group.drain(on_expired="fail")
    with caplog.at_level(logging.ERROR), group.source() as source:
        assert offsets(group.take(source)) == [7, 8, 9]
        assert source.lease.state["set_aside"] == {"expired": 5}

    assert "5 messages of" in caplog.text
    assert f"{group.topic}-0-2 was to be retried, and is gone" in caplog.text


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


def test_superseded_versions_of_a_claim_are_removed(kafka: KafkaServer, tmp_path: Path) -> None:
    group = KafkaGroup(kafka, tmp_path)
    for _ in range(8):
        group.fill(1)
        group.drain()

    [folder] = tmp_path.glob("kafka/*/claims/*/0")
    assert len(list(folder.iterdir())) <= 11


def test_a_writer_that_slept_finds_that_others_went_on(kafka: KafkaServer, tmp_path: Path) -> None:
    # Given a process that has read a claim, and slept until all versions that it knew were removed
    group = KafkaGroup(kafka, tmp_path)
    group.fill(2)
    group.drain()
    place = (group.topic, 0)
    slept = group.claims()
    stale = slept.read(place)
    for _ in range(6):
        group.fill(1)
        group.drain()

    # When it writes on, then it is told that others were faster, and goes by the newest
    assert stale is not None
    assert not slept.replace(place, stale, dataclasses.replace(stale, epoch=7))
    newest = slept.read(place)
    assert newest is not None
    assert (stale.start, newest.start) == (2, 8)
    assert slept.replace(place, newest, dataclasses.replace(newest, epoch=7))
    assert (group.claim().start, group.claim().epoch) == (8, 7)


def test_a_process_that_sleeps_as_it_begins_a_group_marks_what_others_have_handled(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given one that sleeps before its first commit, until another has handled all
    group = KafkaGroup(kafka, tmp_path)
    group.fill(6)
    committed, handled = Cluster.commit, list[Any]()

    def late(self: Cluster, offsets: Any) -> None:
        monkeypatch.undo()
        group.clock.sleep(40.0)
        handled.extend(group.drain())
        committed(self, offsets)

    monkeypatch.setattr(Cluster, "commit", late)

    # When it goes on
    again = group.drain()

    # Then its commit came late
    assert (len(handled), offsets(again)) == (6, list(range(6)))
    assert all(message.redelivered for message in again)
    assert group.committed() == {0: 6}


def test_a_process_that_dies_as_it_begins_a_group_holds_nobody_up(
    kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given one that is killed when it has claimed where the group begins, and not committed it
    group = KafkaGroup(kafka, tmp_path, lease=3600.0)
    group.fill(3)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            group.hold()

    group.clock.sleep(31.0)

    assert offsets(group.drain()) == [0, 1, 2]
