"""A run's first offset: by table and committed offset, and refusals before the first receive."""

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
from airflow_broadway.core.custody.verdicts import ACK, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.source import KafkaSource
from tests.kafka_fixtures import on_apache_kafka
from tests.kafka_group import KafkaGroup, offsets, reset_offsets
from tests.kafka_server import KafkaServer
from tests.waiting import eventually

pytestmark = pytest.mark.broker

RETRY = Verdict(Action.RETRY, 0.0, "again", "process")
DEAD = Verdict(Action.DEAD_LETTER, reason="no", stage="process")


# ------------------------------------------------------------------------------- a new group
@pytest.mark.parametrize(("policy", "expected"), [("earliest", [0, 1, 2]), ("latest", [])])
def test_a_new_group_begins_by_its_policy(kafka, tmp_path, policy, expected):
    group = KafkaGroup(kafka, tmp_path, offset_reset_policy=policy)
    group.fill(3)

    assert offsets(group.drain()) == expected
    group.fill(2)

    assert offsets(group.drain()) == [3, 4]


@on_apache_kafka
def test_a_new_group_begins_at_a_timestamp(kafka, group):
    first = datetime.now(UTC) - timedelta(hours=1)
    producer = kafka.producer()
    for minute in range(5):
        at = round((first + timedelta(minutes=minute)).timestamp() * 1000)
        producer.produce(group.topic, b"x", timestamp=at)
    producer.flush(30)
    policy = (first + timedelta(seconds=150)).isoformat()

    assert offsets(group.drain(offset_reset_policy=policy)) == [3, 4]


@on_apache_kafka
def test_a_new_group_begins_at_the_end_past_the_last_timestamp(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, offset_reset_policy="2100-01-01T00:00:00Z")
    group.fill(3)

    assert group.drain() == []
    assert group.committed() == {0: 3}


def test_two_concurrent_sources_agree_on_the_start(kafka, tmp_path):
    # Given a new group that begins at the end
    group = KafkaGroup(kafka, tmp_path, partitions=4, offset_reset_policy="latest", concurrency=2)
    group.fill(40)

    # When the first source has opened, and committed the offsets of its partitions
    with group.source(index=0) as first, group.source(index=1) as second:
        # Then the second source's partitions are not new
        assert group.take(first) == group.take(second) == []
        group.fill(8)
        partitions = [set(_partitions_of(source, 4)) for source in (first, second)]

    assert partitions == [{0, 2}, {1, 3}]


def _partitions_of(source: KafkaSource, number: int) -> list[int]:
    """Receives so many messages, in portions; returns their partitions."""
    partitions: list[int] = []
    while len(partitions) < number:
        messages = source.receive(number, timeout=10.0)
        assert messages, f"only {len(partitions)} of {number} came"
        partitions += [message.metadata["partition"] for message in messages]
    return partitions


@on_apache_kafka
def test_an_added_partition_is_read_from_its_beginning(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, offset_reset_policy="latest")
    group.fill(3)
    assert group.drain() == []
    kafka.add_partitions(group.topic, 2)
    eventually(lambda: kafka.partitions(group.topic) == [0, 1])
    group.fill(2, partition=1)

    assert [m.message_id for m in group.drain()] == [
        f"{group.topic}-1-{offset}" for offset in (0, 1)
    ]


# ------------------------------------------------------------------------------- an offset exists
def test_a_plain_consumers_offsets_are_taken_over(kafka, group):
    group.fill(5)
    kafka.commit(group.group, group.topic, 0, 3, "of somebody")

    messages = group.drain()

    assert offsets(messages) == [3, 4]
    assert not any(message.redelivered for message in messages)


def test_idle_partitions_are_committed_once(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, partitions=3)
    group.fill(2, partition=1)

    group.drain()

    assert group.committed() == {0: 0, 1: 2, 2: 0}
    committed = kafka.committed(group.group, group.topic)
    assert json.loads(committed[1][1] or "") == {"b": 2, "o": group.claims().owner(), "h": 2}
    assert all(len(metadata or "") <= 90 for _, metadata in committed.values())


@on_apache_kafka
def test_an_expired_offset_loses_nothing(kafka, tmp_path, caplog):
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


def test_a_late_commit_of_an_earlier_run_redelivers_marked_messages(kafka, group, caplog):
    # Given a settler that slept between its last look and its commit, until others had continued
    lease, messages = group.hold(most=2, fill=5)
    group.settle(lease, messages)
    offset, mark = kafka.committed(group.group, group.topic)[0]
    group.drain()
    kafka.commit(group.group, group.topic, 0, offset, mark or "")

    again = group.drain()

    assert (offsets(again), {m.redelivered for m in again}) == ([2, 3, 4], {True})
    assert "went back from 5 to 2 by a commit of an earlier run that came late" in caplog.text
    assert "another program" not in caplog.text
    assert group.committed() == {0: 5}


def test_an_operators_reset_is_honoured(kafka, group, caplog):
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


def test_a_reset_during_a_run_counts_and_lapses_its_messages(kafka, group):
    group.fill(6)
    group.drain()
    lease, messages = group.hold("holder", fill=4)
    kafka.commit(group.group, group.topic, 0, 2)
    assert group.drain() == []  # the run holds the partition

    report = group.settle(lease, messages, {messages[0].message_id: DEAD})

    assert (report.acked, report.dead_lettered, report.lapsed) == (0, 0, 4)
    assert kafka.bodies(group.letters) == []  # it is redelivered
    assert (
        "was reset from 6 to 2 while a run held its messages: the reset counts"
        in (report.errors[0])
    )
    again = group.drain()
    assert (offsets(again), {m.redelivered for m in again}) == ([*range(2, 10)], {True})
    assert group.committed() == {0: 10}


def test_a_reset_counts_despite_later_claims(kafka, group, monkeypatch):
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


def test_a_late_commit_during_a_run_is_no_reset(kafka, group):
    group.fill(5)
    group.drain()
    offset, mark = kafka.committed(group.group, group.topic)[0]
    group.fill(4)
    group.drain()
    lease, messages = group.hold(fill=3)
    kafka.commit(group.group, group.topic, 0, offset, mark or "")

    report = group.settle(lease, messages)

    assert (report.acked, report.lapsed) == (0, 3)
    assert "went from 9 to 5 by a late commit of an earlier run" in report.errors[0]
    again = group.drain()
    assert (offsets(again), {m.redelivered for m in again}) == ([*range(5, 12)], {True})


# ------------------------------------------------------------------------------- refusals
def test_a_missing_topic_is_refused(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, topics=["nowhere"], retry=RetryPolicy(dead_letter=False))

    with pytest.raises(ProducerError) as raised:
        group.drain()

    assert str(raised.value) == (
        f"the topic 'nowhere' does not exist on {kafka.bootstrap}, or Describe on it is not"
        " allowed: create it, or check the option topics"
    )
    assert kafka.partitions("nowhere") == []  # nor was it created


def test_a_missing_dead_letter_topic_is_refused(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, dead_letter="no-such-letters")
    group.fill(1)

    with pytest.raises(ProducerError, match="the dead-letter topic 'no-such-letters' does not ex"):
        group.drain()

    assert kafka.partitions("no-such-letters") == []
    assert len(group.drain(retry=RetryPolicy(dead_letter=False))) == 1
    group.fill(1)
    assert len(group.drain(on_failure="ack")) == 1


@on_apache_kafka
def test_a_group_with_members_is_refused(kafka, group):
    with (
        kafka.member(group.group, group.topic),
        pytest.raises(ProducerError, match=r"has 1 member \(.*group_id of its own"),
    ):
        group.drain()


def test_another_staging_folder_continues_at_the_committed_offset(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path / "one")
    group.fill(3)
    group.drain()
    group.fill(2)
    group.staging = f"file://{tmp_path}/two"

    messages = group.drain()

    assert offsets(messages) == [3, 4]
    assert not any(message.redelivered for message in messages)


def test_messages_held_from_another_staging_folder_are_spared_until_the_lease_lapses(
    kafka, tmp_path, caplog
):
    group = KafkaGroup(kafka, tmp_path / "one", lease=100.0)
    lease, held = group.hold(fill=3)
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


def test_two_staging_folders_begin_a_group_without_repetition(kafka, tmp_path):
    # Given two sources, both opened before the first claim
    group_a = KafkaGroup(kafka, tmp_path / "one")
    group_a.fill(300)
    group_b = KafkaGroup(kafka, tmp_path / "two")
    group_b.topic, group_b.letters, group_b.group = group_a.topic, group_a.letters, group_a.group
    with group_a.source("first") as first, group_b.source("second") as second:
        # When both receive
        batches = [group_a.take(first), group_b.take(second)]
        first.stop()
        second.stop()
        settlements = zip((group_a, group_b), (first, second), batches, strict=True)
        reports = [group.settle(source.lease, batch) for group, source, batch in settlements]

    # Then the group's offset, which both commit with their mark, has decided
    assert [len(messages) for messages in batches] == [300, 0]
    assert [report.acked for report in reports] == [300, 0]
    assert group_b.drain() == []


def two_staging_folders(kafka: KafkaServer, folder: Path) -> tuple[KafkaGroup, KafkaGroup]:
    """Returns two users of a group, each with its own staging folder; 30 of 60 messages read."""
    group_a = KafkaGroup(kafka, folder / "one")
    group_a.fill(30)
    group_a.drain()
    group_a.fill(30)
    group_b = KafkaGroup(kafka, folder / "two")
    group_b.topic, group_b.letters, group_b.group = group_a.topic, group_a.letters, group_a.group
    return group_a, group_b


def test_the_last_commit_of_two_staging_folders_counts(kafka, tmp_path, monkeypatch):
    group_a, group_b = two_staging_folders(kafka, tmp_path)
    with group_a.source("first") as first, group_b.source("second") as second:
        # Given a source that commits its claim between the other's look and the other's commit
        committed = Cluster.commit
        taken: list[Any] = []

        def late(self: Cluster, offsets: Any) -> None:
            if self is first._cluster and not taken:
                taken.extend(group_b.take(second))
            committed(self, offsets)

        monkeypatch.setattr(Cluster, "commit", late)
        received = group_a.take(first)
        monkeypatch.undo()
        first.stop()
        second.stop()
        reports = [group_a.settle(first.lease, received), group_b.settle(second.lease, taken)]

    # Then both have handled the messages, and one of the two reports it
    assert (len(received), len(taken)) == (30, 30)
    assert [(report.acked, report.lapsed) for report in reports] == [(30, 0), (0, 30)]
    assert "a run with another staging folder" in reports[1].errors[0]
    assert group_a.committed() == {0: 60}


def test_an_overtaken_commit_delivers_nothing(kafka, tmp_path, monkeypatch):
    # Given two sources that have both looked when the first commits its claim
    group_a, group_b = two_staging_folders(kafka, tmp_path)
    committed, looked, may_commit = Cluster.commit, threading.Event(), threading.Event()
    with group_a.source("first") as first, group_b.source("second") as second:
        taken: list[Any] = []
        receiver = threading.Thread(target=lambda: taken.extend(group_b.take(second)))

        def commit(self: Cluster, offsets: Any) -> None:
            if self is second._cluster:
                looked.set()
                assert may_commit.wait(60)
                committed(self, offsets)
                return
            if not receiver.ident:
                receiver.start()
                assert looked.wait(60)
            committed(self, offsets)
            may_commit.set()
            receiver.join(60)

        # When the second commits before the first looks again
        monkeypatch.setattr(Cluster, "commit", commit)
        received = group_a.take(first)
        monkeypatch.undo()

    # Then one of the two has the messages
    assert (len(received), len(taken)) == (0, 30)


def test_a_staging_folder_restored_from_backup_loses_and_repeats_nothing(kafka, tmp_path, caplog):
    # Given a copy of the staging folder, and later runs, the last of them unsettled
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

    # Then the offset in Kafka counts, and its metadata has the delivered messages
    assert offsets(again) == list(range(100, 210))
    assert [m.redelivered for m in again] == [True] * 100 + [False] * 10
    assert "staging knows of 50: it is older, or was restored" in caplog.text


def test_offsets_finished_without_staging_stand(group):
    staging, group.staging = group.staging, None
    lease, messages = group.hold(fill=4)
    group.settle(lease, messages, {messages[1].message_id: RETRY})
    group.staging = staging

    again = group.drain()

    assert offsets(again) == [1, 2, 3]
    assert all(message.redelivered for message in again)


@pytest.mark.parametrize("finished", [True, False], ids=["after a commit", "before one"])
def test_a_recreated_topic_is_refused_until_a_reset(apache_kafka, tmp_path, finished):
    group = KafkaGroup(apache_kafka, tmp_path)
    lease, messages = group.hold(fill=3)
    # Without a commit, the claim begins where the group is reset to
    group.settle(lease, messages, rest=ACK if finished else RELEASE)
    assert group.committed() == {0: 3 if finished else 0}
    apache_kafka.delete_topic(group.topic)
    eventually(lambda: apache_kafka.partitions(group.topic) == [])
    apache_kafka.topic(group.topic)
    group.fill(2)

    with pytest.raises(
        ProducerError, match=r"was created again since the group .* read it: .*--reset-offsets"
    ):
        group.drain()

    reset_offsets(group, "--to-earliest")
    assert offsets(group.drain()) == [0, 1]
    assert group.drain() == []


@on_apache_kafka
@pytest.mark.parametrize(
    ("order", "option", "policy", "text"),
    [
        ("partition", "dead_letter", "compact,delete", "-compacted' .* is compacted"),
        ("none", "retry_topic", "compact", "the retry topic '.*-compacted' .*"),
    ],
    ids=["dead letters", "retries"],
)
def test_a_compacted_topic_is_refused(kafka, tmp_path, order, option, policy, text):
    group = KafkaGroup(kafka, tmp_path, order=order)
    group.fill(3)
    compacted = kafka.topic(f"{group.topic}-compacted", settings={"cleanup.policy": policy})

    with pytest.raises(ProducerError, match=rf"{text} \(cleanup.policy={policy}\)"):
        group.drain(**{option: compacted})

    assert offsets(group.drain()) == [0, 1, 2]


def test_a_topic_with_another_id_is_refused(kafka, group, monkeypatch):
    # Given a cluster that names its topics by an id (no peer here does)
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
    ids.clear()  # without ids there is nothing to compare
    assert group.drain() == []


@on_apache_kafka
def test_messages_removed_by_retention_are_reported_and_skipped(kafka, group, caplog):
    lease, messages = group.hold(most=4, fill=10)
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
    assert f"{group.topic}-0-2 was deleted before it was retried" in caplog.text


def test_a_group_without_write_permission_is_refused(kafka_mock, tmp_path):
    group = KafkaGroup(kafka_mock, tmp_path)
    group.fill(1)
    kafka_mock.tell("push_request_errors_array", 8, [30])  # OffsetCommit: GROUP_AUTHORIZATION_…

    with pytest.raises(ProducerError, match=r"the group is not allowed .*allow Read and Describe"):
        group.drain()


# ------------------------------------------------------------------------------- crashes
def test_a_dead_runs_messages_are_free_half_a_minute_after_its_lease(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, lease=100.0)
    lease, _ = group.hold(fill=3)

    group.clock.sleep(125.0)
    assert group.drain() == []
    group.clock.sleep(10.0)
    again = group.drain()

    assert offsets(again) == [0, 1, 2]
    assert all(message.redelivered and message.attempt == 1 for message in again)
    assert group.settle(lease, again).lapsed == 3
    assert group.committed() == {0: 3}


def test_superseded_versions_of_a_claim_are_removed(group, tmp_path):
    for _ in range(8):
        group.fill(1)
        group.drain()

    [folder] = tmp_path.glob("kafka/*/claims/*/0")
    assert len(list(folder.iterdir())) <= 11


def test_a_writer_that_slept_is_fenced_off(group):
    # Given a process that has read a claim, and slept until all versions that it knew were removed
    group.fill(2)
    group.drain()
    place = (group.topic, 0)
    slept = group.claims()
    stale = slept.read(place)
    for _ in range(6):
        group.fill(1)
        group.drain()

    # When it resumes, its write is refused, and it continues with the newest version
    assert stale is not None
    assert not slept.replace(place, stale, dataclasses.replace(stale, epoch=7))
    newest = slept.read(place)
    assert newest is not None
    assert (stale.start, newest.start) == (2, 8)
    assert slept.replace(place, newest, dataclasses.replace(newest, epoch=7))
    assert (group.claim().start, group.claim().epoch) == (8, 7)


def test_a_process_that_sleeps_while_beginning_a_group_marks_handled_messages(group, monkeypatch):
    # Given a process that sleeps before its first commit, until another has handled all
    group.fill(6)
    committed, handled = Cluster.commit, list[Any]()

    def late(self: Cluster, offsets: Any) -> None:
        monkeypatch.undo()
        group.clock.sleep(40.0)
        handled.extend(group.drain())
        committed(self, offsets)

    monkeypatch.setattr(Cluster, "commit", late)

    # When it continues
    again = group.drain()

    # Then its commit came late
    assert (len(handled), offsets(again)) == (6, list(range(6)))
    assert all(message.redelivered for message in again)
    assert group.committed() == {0: 6}


def test_a_process_that_dies_while_beginning_a_group_blocks_no_other(kafka, tmp_path, monkeypatch):
    # Given a process that is killed after it has claimed the group's start, before its commit
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
