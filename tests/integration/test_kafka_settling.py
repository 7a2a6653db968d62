"""Settlement of a generation: claims, dead letters, commits; and crashes in between."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from airflow_broadway import Broadway, Message, Processors, RetryPolicy
from airflow_broadway.core.custody.dead_letters import Choice
from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.protocol import Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import ACK, LEAVE, RELEASE, Action, Verdict
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.kafka.claims import GenerationFiles
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kit.generation_log import GenerationLog
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.tasks import ProcessTask
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.settling.journal import settled_journal
from airflow_broadway.staging.store import Store
from airflow_broadway.testing.harness import settlement_of
from tests.kafka_fixtures import on_apache_kafka
from tests.kafka_group import KafkaGroup, offsets

pytestmark = pytest.mark.broker

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "ValueError: no delay in 'ü'", "process")
RETRY = Verdict(Action.RETRY, 0.0, "again", "batch")


def letters(group: KafkaGroup, topic: str = "") -> list[Any]:
    return group.kafka.read(topic or group.letters)


def headers(letter: Any) -> dict[str, str]:
    return {name: (value or b"").decode("utf-8", "replace") for name, value in letter.headers()}


# ------------------------------------------------------------------------------- dead letters
def test_a_dead_letter_has_message_and_reason(kafka, group):
    producer = kafka.producer()
    own: list[Any] = [("trace", b"\xff"), ("broadway.again", b"old"), ("none", None)]
    begun = round(time.time() * 1000)
    timestamp = begun - 3_600_000
    producer.produce(group.topic, b"\x00body\xff", b"\xfekey", headers=own, timestamp=timestamp)
    producer.flush(30)
    lease, [message] = group.hold("generation one")

    report = group.settle(lease, [message], {message.message_id: DEAD})

    assert report == SettleReport(dead_lettered=1)
    [letter] = letters(group)
    assert (letter.value(), letter.key()) == (b"\x00body\xff", b"\xfekey")
    # Retention uses it: the dead letter of a message that is a month old must not expire.
    assert letter.timestamp()[1] >= begun
    assert letter.headers()[:2] == [("trace", b"\xff"), ("none", None)]
    assert headers(letter) | {"trace": ""} == {
        "trace": "",
        "none": "",
        "__connect.errors.topic": group.topic,
        "__connect.errors.partition": "0",
        "__connect.errors.offset": "0",
        "__connect.errors.stage": "process",
        "__connect.errors.exception.class.name": "ValueError",
        "__connect.errors.exception.message": "no delay in 'ü'",
        "__connect.errors.connector.name": "flights",
        "__connect.errors.task.id": "generation one",
        "broadway.group": group.group,
        "broadway.attempt": "1",
        "broadway.generation": "generation one",
        "broadway.timestamp": str(timestamp),
        "broadway.again": "0",
    }


def test_dead_letters_far_apart_are_all_sent(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, partitions=2, order="none")
    lease, messages = group.hold(fill=12_000)
    dead = [m for m in messages if m.metadata["offset"] in (0, 1, 7, 4_500, 5_999)]

    report = group.settle(lease, messages, {m.message_id: DEAD for m in dead})

    assert report == SettleReport(acked=11_990, dead_lettered=10)
    assert sorted(letter.value() for letter in letters(group)) == sorted(m.data for m in dead)


def test_a_redelivered_messages_dead_letter_is_marked(group):
    lease, [message] = group.hold(fill=1)
    group.settle(lease, [message], {message.message_id: RETRY})
    lease, [again] = group.hold()

    group.settle(lease, [again], {again.message_id: DEAD})

    [letter] = letters(group)
    assert headers(letter)["broadway.again"] == "1"
    assert headers(letter)["broadway.attempt"] == "2"


def test_dead_letters_sent_again_after_a_crash_are_marked(group):
    lease, messages = group.hold(fill=3)
    verdicts = {messages[0].message_id: DEAD}
    group.die_settling(GenerationLog, "begin", lease, messages, verdicts)

    report = group.settle(lease, messages, verdicts)

    assert report == SettleReport(acked=2, dead_lettered=1)
    assert [headers(letter)["broadway.again"] for letter in letters(group)] == ["0", "1"]


def _killed(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_an_unrecorded_immediate_dead_letter_is_marked_when_repeated(group, monkeypatch):
    lease, messages = group.hold(fill=2)
    custodian = group.producer().custodian(group.env("c"))
    with monkeypatch.context() as patched:
        patched.setattr(GenerationFiles, "note_decisions", _killed)
        with pytest.raises(KeyboardInterrupt):
            custodian.settle_now(lease, [entry_of(messages[0], DEAD)])
    custodian.close()

    dead = {message.message_id: DEAD for message in messages}
    assert group.settle(lease, messages, dead) == SettleReport(dead_lettered=2)

    again = {letter.value(): [] for letter in letters(group)}  # type: ignore[var-annotated]
    for letter in letters(group):
        again[letter.value()].append(headers(letter)["broadway.again"])
    assert again == {b"000000": ["0", "1"], b"000001": ["0"]}


@on_apache_kafka
def test_a_dead_letter_without_body_is_marked(kafka, group):
    lease, messages = group.hold(fill=5)
    kafka.delete_before(group.topic, 0, 3)

    report = group.settle(lease, messages, {messages[n].message_id: DEAD for n in (0, 2, 4)})

    assert report == SettleReport(acked=2, dead_lettered=3)
    sent = letters(group)
    assert [letter.value() for letter in sent] == [None, None, b"000004"]
    assert headers(sent[0])["broadway.body"].startswith("deleted: it was compacted, or removed")
    assert "broadway.body" not in headers(sent[2])


def test_an_oversized_dead_letter_is_sent_without_body(apache_kafka, tmp_path, monkeypatch):
    # Given a dead-letter topic with a smaller limit than the topic (here the client's limit)
    group = KafkaGroup(apache_kafka, tmp_path)
    apache_kafka.fill(group.topic, [b"x" * 200_000, b"small"])
    lease, messages = group.hold()
    settings = {"message.max.bytes": 100_000}

    report = group.settle(
        lease, messages, {m.message_id: DEAD for m in messages}, settings=settings
    )

    assert report == SettleReport(dead_lettered=2)
    sent = sorted(letters(group), key=lambda letter: letter.value() or b"")
    assert [letter.value() for letter in sent] == [None, b"small"]
    assert headers(sent[0])["broadway.body"] == "too large for the topic: 200,000 bytes"


def test_dead_letters_without_topic_stay_in_their_partition(kafka, tmp_path):
    # Given a message that dead-letters itself, where no dead letters were configured
    group = KafkaGroup(kafka, tmp_path, dead_letter="nowhere-to-go", on_failure="ack")
    lease, messages = group.hold(fill=3)

    report = group.settle(lease, messages, {messages[1].message_id: DEAD})

    assert (report.acked, report.failed, report.released) == (1, 1, 1)
    assert "there is no topic 'nowhere-to-go' for dead letters" in report.errors[0]
    assert offsets(group.drain()) == [1, 2]
    assert kafka.partitions("nowhere-to-go") == []


def test_offsets_are_finished_only_after_their_dead_letters(group, monkeypatch):
    # Given five dead letters on one partition, moved two at a time
    monkeypatch.setattr("airflow_broadway.producers.kafka.letters._WAVE", 2)
    lease, messages = group.hold(fill=5)
    group.settle(lease, messages, {message.message_id: DEAD for message in messages})

    # When the first two are deleted
    with closing(group.producer().dead_letters(group.env("letters"))) as place:
        all_letters = list(place.letters())
        first = frozenset(letter.message_id for letter in all_letters[:2])
        assert place.delete(Choice(ids=first)).count == 2

    # Then the others remain
    with closing(group.producer().dead_letters(group.env("letters"))) as place:
        left = [letter.message_id for letter in place.letters()]
    assert left == [letter.message_id for letter in all_letters[2:]]


# ------------------------------------------------------------------------------- the offsets
def test_a_refused_commit_settles_nothing(kafka_mock, tmp_path):
    group = KafkaGroup(kafka_mock, tmp_path)
    lease, messages = group.hold(fill=3)
    kafka_mock.tell("push_request_errors_array", 8, [30])

    with pytest.raises(ProducerError, match="the group is not allowed"):
        group.settle(lease, messages, rest=ACK)

    assert group.committed() == {0: 0}
    assert group.drain() == []
    # The next settlement carries out the recorded decision
    assert group.settle(lease, messages, rest=RELEASE) == SettleReport(acked=3)
    assert group.committed() == {0: 3}


def test_a_decided_settlement_survives_a_takeover(kafka_mock, tmp_path):
    # Given a settler that dies after its decision, before its commit
    group = KafkaGroup(kafka_mock, tmp_path, lease=100.0)
    lease, messages = group.hold(fill=6)
    kafka_mock.tell("push_request_errors_array", 8, [30])
    with pytest.raises(ProducerError):
        group.settle(lease, messages, {messages[4].message_id: DEAD, messages[5].message_id: RETRY})

    group.clock.sleep(200.0)
    [again] = group.drain()

    assert (again.metadata["offset"], again.attempt, again.redelivered) == (5, 2, True)
    assert len(letters(group)) == 1
    assert group.committed() == {0: 6}
    report = group.settle(lease, messages)
    assert report == SettleReport(acked=4, dead_lettered=1, requeued=1)


def test_a_million_messages_are_settled_by_counts(group):
    lease, messages = group.hold(fill=100)

    def unread() -> Any:
        raise AssertionError("ids were read")

    settlement = replace(settlement_of(messages), everything=unread)

    assert group.carry_out(lease, settlement) == SettleReport(acked=100)


def test_messages_missing_from_the_manifest_are_released(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, order="none")
    lease, messages = group.hold(fill=5)

    report = group.settle(lease, messages[:3])

    assert report == SettleReport(acked=3, released=2)
    assert offsets(group.drain()) == [3, 4]


def test_an_inconsistent_manifest_settles_nothing(group):
    lease, _ = group.hold(fill=5)

    with pytest.raises(ProducerError, match="read 5 messages and its manifest names 3: none was"):
        group.carry_out(lease, Settlement(rest=ACK, expected=3))


# ------------------------------------------------------------------------------- kills
@pytest.mark.parametrize("kill_at", range(1, 6))
def test_a_settlement_killed_at_any_write_reports_the_same(
    kafka_mock, tmp_path, monkeypatch, kill_at
):
    group = KafkaGroup(kafka_mock, tmp_path, partitions=3, order="none")
    lease, messages = group.hold(fill=30)
    verdicts = {messages[0].message_id: RETRY, messages[7].message_id: DEAD}
    from airflow_broadway.producers.kit.state_files import StateFiles

    writes, create = [0], StateFiles.create

    def counted(self: Any, name: str, value: Any) -> bool:
        writes[0] += 1
        if writes[0] == kill_at:
            raise KeyboardInterrupt
        return create(self, name, value)

    with monkeypatch.context() as patched:
        patched.setattr(StateFiles, "create", counted)
        with pytest.raises(KeyboardInterrupt):
            group.settle(lease, messages, verdicts)

    first = group.settle(lease, messages, verdicts)

    assert first == SettleReport(acked=28, requeued=1, dead_lettered=1)
    assert group.settle(lease, messages, verdicts) == first
    assert {m.message_id for m in group.drain()} == {messages[0].message_id}


def test_the_first_of_two_conflicting_settlements_counts(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, partitions=2)
    lease, messages = group.hold(fill=10)
    group.die_settling(Cluster, "commit", lease, messages)

    report = group.settle(lease, messages, rest=RELEASE)

    assert report == SettleReport(acked=10)
    assert group.drain() == []


# ------------------------------------------------------------------------------- order and halts
def test_a_halt_keeps_later_messages_and_fails_the_run(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, partitions=2)
    lease, messages = group.hold(fill=10)
    halt = next(m for m in messages if m.message_id == f"{group.topic}-0-2")

    report = group.settle(lease, messages, {halt.message_id: LEAVE})

    assert report == SettleReport(acked=7, left=1, released=2)
    assert report.halted == 1
    assert group.committed() == {0: 2, 1: 5}
    again = group.drain()
    assert offsets(again) == [2, 3, 4]
    assert all(message.redelivered for message in again)


class Failing(Broadway):
    """Fails the third message."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("no") if message.data == b"000002" else message


def test_by_default_a_partition_stops_at_its_first_failure(kafka_mock, tmp_path):
    group = KafkaGroup(kafka_mock, tmp_path)
    group.fill(6)
    pipeline = type("Failed", (Failing,), {"producer": group.producer()})

    first, second = pipeline().run_local(), pipeline().run_local()

    settled = first.settled
    assert (settled.acked, settled.requeued, settled.released) == (2, 1, 3)
    assert second.received == 0  # nothing, until the failed message is due for its retry


class Halting(Broadway):
    """Halts at the third message."""

    processors = Processors(concurrency=1, max_demand=2, min_demand=0)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data == b"000002":
            return message.failed("ValueError: look").configure_ack(on_failure="halt")
        return message


@pytest.mark.parametrize("staged", [False, True])
def test_a_pipeline_halts_by_itself(kafka, tmp_path, staged):
    group = KafkaGroup(kafka, tmp_path, retry=RetryPolicy(max_attempts=1))
    group.fill(6)

    pipeline = type("Halted", (Halting,), {"producer": group.producer()})()
    if staged:
        store = Store.open(f"file://{tmp_path}/staging")
        run = StagedRun(store, pipeline="Halted", dag_id="flights", run_id="manual")
        task = Task(dag_id="flights", run_id="manual", task_id="process")
        done = ProcessTask(run, pipeline, task, Ports(), budget=Budget()).run()
        trouble = done.trouble
        [record] = run.generations()
        settled = settled_journal(run, record.generation)
        assert settled is not None
        totals = settled.report.classes()
    else:
        report = pipeline.run_local()
        trouble, totals = report.trouble(), report.totals()

    assert totals["left"] == 1
    assert totals["acked"] == 2
    assert totals["released"] == 3
    assert "1 message holds up its run" in trouble


def test_a_per_message_verdict_wins(kafka, tmp_path):
    class Choosing(Broadway):
        producer = KafkaGroup(kafka, tmp_path, order="none").producer()

        def handle_message(self, processor: str, message: Message, context: Any) -> Message:
            return message.failed("no").configure_ack(on_failure=message.data.decode())

    group = KafkaGroup(kafka, tmp_path, order="none")
    kafka.fill(group.topic, [b"ack", b"retry", b"dead_letter", b"halt"])
    pipeline = type("Chosen", (Choosing,), {"producer": group.producer()})

    report = pipeline().run_local()

    settled = report.settled
    assert (settled.acked, settled.requeued, settled.dead_lettered, settled.left) == (1, 1, 1, 1)
    assert [record.value() for record in letters(group, group.retries)] == [b"retry"]
    assert [letter.value() for letter in letters(group)] == [b"dead_letter"]


# ------------------------------------------------------------------------------- late
def test_a_late_settlement_settles_unclaimed_messages(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, partitions=2, lease=100.0, concurrency=2)
    group.fill(10)
    with group.source("late", index=0) as source:
        messages = group.take(source)
        source.stop()
        lease = Lease.from_json(json.loads(json.dumps(source.lease.to_json())))
    group.clock.sleep(1000.0)

    assert group.settle(lease, messages) == SettleReport(acked=5)
    assert group.committed()[0] == 5


def test_a_late_settlement_holds_its_messages_meanwhile(kafka, tmp_path, monkeypatch):
    # Given a settlement behind the end of its lease, and another run before its plan is recorded
    group = KafkaGroup(kafka, tmp_path, lease=100.0)
    lease, messages = group.hold(fill=5)
    group.clock.sleep(1000.0)
    begin, taken = GenerationLog.begin, list[Any]()

    def begin_late(self: GenerationLog, plan: Any = None) -> Any:
        monkeypatch.undo()
        taken.extend(group.drain())
        return begin(self, plan)

    monkeypatch.setattr(GenerationLog, "begin", begin_late)

    assert group.settle(lease, messages) == SettleReport(acked=5)
    assert taken == []


def test_a_lease_with_different_options_is_refused(group):
    lease, messages = group.hold(fill=1)

    with pytest.raises(ProducerError, match="give both halves of the run the same options"):
        group.settle(lease, messages, group_id="another")
