"""Receiving from a topic: each readable message, unchanged, up to the end."""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway import Broadway
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import RELEASE, Action, Verdict
from airflow_broadway.core.errors import LeaseLapsed, ProducerError, ProducerUnavailable
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.tasks import ProcessTask, UnstagedTask
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from tests.kafka_fixtures import on_apache_kafka
from tests.kafka_group import KafkaGroup, offsets
from tests.kafka_server import MockKafka
from tests.waiting import eventually

pytestmark = pytest.mark.broker


# ------------------------------------------------------------------------------- messages
def test_metadata_is_json_in_broadways_terms(kafka, group):
    at = round(time.time() * 1000) - 5_000
    producer = kafka.producer()
    headers: list[Any] = [("trace", b"abc"), ("trace", b"\xff\x00"), ("none", None)]
    producer.produce(group.topic, b"body", "Zürich".encode(), headers=headers, timestamp=at)
    producer.produce(group.topic, b"", b"\xfe\xff", timestamp=at)
    producer.produce(group.topic, b"\xff", timestamp=at)
    producer.flush(30)

    first, second, third = group.drain()

    assert dict(first.metadata) == {
        "topic": group.topic,
        "partition": 0,
        "offset": 0,
        "key": "Zürich",
        "ts": at,
        "headers": [["trace", "abc"], ["trace", "base64:/wA="], ["none", None]],
    }
    assert first.message_id == f"{group.topic}-0-0"
    assert first.batch_key == (group.topic, 0)
    assert (second.data, second.metadata["key"], second.size) == (b"", "base64:/v8=", 0)
    assert (third.data, third.metadata["key"], third.metadata["headers"]) == (b"\xff", None, [])
    assert first.received_at.tzinfo is UTC
    json.dumps([dict(message.metadata) for message in (first, second, third)])


def test_a_tombstone_has_no_data(kafka, group):
    producer = kafka.producer()
    producer.produce(group.topic, None, b"key")
    producer.flush(30)

    [message] = group.drain()

    assert (message.data, message.size, message.metadata["key"]) == (None, 0, "key")


@on_apache_kafka
def test_ends_are_read_during_a_waiting_fetch(kafka, tmp_path):
    # Given a broker that serves a connection's requests in order, and a fetch that waits there
    settings = {"fetch.wait.max.ms": 30_000, "socket.timeout.ms": 3_000}
    group = KafkaGroup(kafka, tmp_path, settings=settings)
    group.fill(2)
    cluster = Cluster(group.producer(), group.env(""))
    try:
        cluster.assign({(group.topic, 0): 0})
        assert len(cluster.consume(2, 10.0)) == 2
        assert cluster.consume(1, 0.5) == []

        # Then the query does not wait for the fetch
        assert cluster.ends((group.topic, 0)) == (0, 2)
    finally:
        cluster.close()


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_are_claimed_whole(group, codec):
    bodies = group.fill(300, settings={"compression.type": codec})

    assert [message.data for message in group.drain()] == bodies
    assert group.committed() == {0: 300}


# ------------------------------------------------------------------------------- the end
@pytest.mark.parametrize("order", ["partition", "key", "none"])
def test_a_run_without_waiting_receives_the_whole_backlog(kafka, tmp_path, order):
    group = KafkaGroup(kafka, tmp_path, partitions=3, order=order)
    group.fill(9_000)

    with group.source() as source:
        taken: list[Any] = []
        while messages := source.receive(700, timeout=0.0):
            taken += messages

    assert len({message.message_id for message in taken}) == 9_000


def test_ten_thousand_messages_need_few_claims(group, tmp_path):
    group.fill(10_000)

    with group.source() as source:
        assert len(group.take(source)) == 10_000

    [folder] = tmp_path.glob("kafka/*/claims/*/0")
    # The group's start, twice; then 2,000, 6,000 and 10,000: of one portion, or two
    assert len(list(folder.iterdir())) <= 6
    assert group.claim().end == 10_000


def test_claims_do_not_exceed_the_log(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, lease=100.0)
    lease, messages = group.hold(most=3, fill=10)
    group.fill(5, start=10)
    group.clock.sleep(140.0)

    again = group.drain()

    assert offsets(messages) == [0, 1, 2]
    assert [message.redelivered for message in again] == 10 * [True] + 5 * [False]
    assert group.settle(lease, messages).lapsed == 3


@on_apache_kafka
def test_aborted_messages_are_never_received_and_the_lag_ends_at_zero(kafka, group):
    # Given 500 messages of which 150 were aborted, and an aborted one at the end
    # (by a producer each: see test_kafka_peers)
    producers = [kafka.producer({"transactional.id": f"{group.topic} {n}"}) for n in (0, 1)]
    for producer in producers:
        producer.init_transactions(30)
    for number in range(50):
        aborted = number % 10 in (0, 1, 9)
        producer = producers[aborted]
        producer.begin_transaction()
        for place in range(10):
            producer.produce(group.topic, b"%d-%d" % (number, place))
        producer.flush(30)
        (producer.abort_transaction if aborted else producer.commit_transaction)(30)
    [(_, end)] = kafka.watermarks(group.topic).values()

    lease, messages = group.hold()
    assert len(messages) == 350
    retried = messages[100]
    verdicts = {retried.message_id: Verdict(Action.RETRY, 0.0, "again", "process")}
    report = group.settle(lease, messages, verdicts)

    assert (report.acked, report.requeued, report.released) == (100, 1, 249)
    assert group.committed() == {0: retried.metadata["offset"]}
    assert len(group.drain()) == 250
    assert group.committed() == {0: end}
    assert group.producer().depth(group.env("")).ready == 0


@on_apache_kafka
def test_aborted_messages_alone_are_committed(kafka, group):
    producer = kafka.producer({"transactional.id": group.topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(group.topic, b"never")
    producer.flush(30)
    producer.abort_transaction(30)

    assert group.drain() == []
    assert group.drain() == []

    [(_, end)] = kafka.watermarks(group.topic).values()
    assert group.committed() == {0: end}


@on_apache_kafka
def test_an_open_transaction_ends_a_run_early_and_loses_nothing(kafka, group, caplog):
    producer = kafka.producer({"transactional.id": group.topic})
    producer.init_transactions(30)
    group.fill(10)
    producer.begin_transaction()
    producer.produce(group.topic, b"open")
    producer.flush(30)
    group.fill(5, start=10)

    with caplog.at_level(logging.WARNING):
        first = group.drain()
    producer.commit_transaction(30)
    second = group.drain()

    assert offsets(first) == list(range(10))
    assert [m.data for m in second] == [b"open", *(b"%06d" % n for n in range(10, 15))]
    assert "a transaction that is still open" in caplog.text


def test_messages_arriving_at_the_end_are_not_reported_as_open_transaction(kafka, tmp_path, caplog):
    group = KafkaGroup(kafka, tmp_path, order="none")
    group.fill(3)
    with caplog.at_level(logging.WARNING), group.source() as source:
        messages = group.take(source)
        assert len(messages) == 3
        group.fill(2)
        # The client learns of them, and the run receives no more.
        place = (group.topic, 0)
        eventually(lambda: source._cluster.known_end(place) == 5)
        source.stop()

        group.settle(source.lease, messages)

    assert "a transaction" not in caplog.text
    assert offsets(group.drain()) == [3, 4]


def test_a_waiting_run_receives_new_messages(group):
    with group.source() as source:
        assert source.receive(10, timeout=0.0) == []
        sender = threading.Timer(0.3, lambda: group.fill(2))
        sender.start()
        messages = source.receive(10, timeout=10.0)
        sender.join()

    assert offsets(messages)[0] == 0


def test_a_stopped_run_does_not_wait(group):
    import dataclasses

    group.fill(5)
    env = dataclasses.replace(group.env("g"), stopping=lambda: True)
    source = group.producer().source(env)
    began = time.monotonic()

    assert source.receive(5, timeout=5.0) == []
    source.close()

    assert time.monotonic() - began < 2.0


def test_an_unreachable_broker_is_reported_first(tmp_path):
    with MockKafka.start(tmp_path / "mock") as kafka:
        group = KafkaGroup(kafka, tmp_path)
    with pytest.raises(ProducerUnavailable, match=r"the cluster cannot be reached \(_TRANSPORT"):
        group.drain(settings={"socket.timeout.ms": 2_000})


# ------------------------------------------------------------------------------- concurrent runs
def test_a_partition_held_by_another_run_is_received_once_free(group):
    lease, messages = group.hold(most=2, fill=4)
    with group.source() as source:
        assert source.receive(10, timeout=0.0) == []
        group.settle(lease, messages)
        group.clock.sleep(11.0)

        assert offsets(source.receive(10, timeout=0.0)) == [2, 3]


def test_a_retry_that_becomes_due_during_a_run_is_received(group):
    lease, messages = group.hold(fill=3)
    retry = Verdict(Action.RETRY, 60.0, "again", "process")
    report = group.settle(lease, messages, {messages[1].message_id: retry})
    assert (report.acked, report.requeued, report.released) == (1, 1, 1)
    with group.source() as source:
        assert source.receive(10, timeout=0.0) == []
        group.clock.sleep(61.0)
        again = source.receive(10, timeout=0.0)

    assert [(m.metadata["offset"], m.attempt) for m in again] == [(1, 2), (2, 1)]


def test_a_waiting_retry_holds_back_its_key(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, order="key")
    for number in range(6):
        group.fill(1, start=number, key=b"ab"[number % 2 : number % 2 + 1])
    lease, messages = group.hold(most=2)
    retry = Verdict(Action.RETRY, 60.0, "again", "process")
    group.settle(lease, messages, {messages[0].message_id: retry})

    assert offsets(group.drain()) == [3, 5]
    assert group.drain() == []
    group.clock.sleep(61.0)
    assert offsets(group.drain()) == [0, 2, 4]
    assert group.committed() == {0: 6}


def test_a_generation_ended_while_claiming_withdraws_its_claim(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, order="none")
    group.fill(4)
    with group.source("g") as source:
        files = group.claims().generation("g")
        create = source._create

        def ended_meanwhile(*args: Any) -> Any:
            files.end_claims()
            return create(*args)

        source._create = ended_meanwhile  # type: ignore[method-assign, assignment]
        with pytest.raises(LeaseLapsed, match="generation g was settled while it still received"):
            source.receive(4, timeout=0.0)
        source._create = create  # type: ignore[method-assign]

    assert group.claim().generation == ""
    assert not any(message.redelivered for message in group.drain())


def test_a_lapsed_generation_receives_no_more(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, lease=100.0)
    group.fill(4)
    with group.source("g") as source:
        source.receive(2, timeout=0.0)
        group.clock.sleep(90.0)
        custodian = group.producer().custodian(group.env("c"))
        assert custodian.renew(source.lease) is not None
        group.clock.sleep(90.0)
        assert len(source.receive(1, timeout=0.0)) == 1
        group.clock.sleep(101.0)
        assert custodian.renew(source.lease) is None
        with pytest.raises(LeaseLapsed, match="over before it was renewed"):
            source.receive(1, timeout=0.0)
        custodian.close()


@on_apache_kafka
def test_messages_removed_by_retention_during_a_run_are_reported(kafka, tmp_path, caplog):
    group = KafkaGroup(kafka, tmp_path, order="none")
    group.fill(20)
    with group.source() as source:
        kafka.delete_before(group.topic, 0, 15)
        messages = group.take(source)
        source.stop()
        lease = source.lease
    group.settle(lease, messages)

    assert offsets(messages) == list(range(15, 20))
    assert lease.state["set_aside"] == {"expired": 15}
    assert "15 messages of" in caplog.text
    assert group.committed() == {0: 20}


@on_apache_kafka
def test_messages_removed_by_retention_may_fail_the_run(kafka, tmp_path):
    group = KafkaGroup(kafka, tmp_path, on_expired="fail")
    group.fill(20)
    with group.source() as source:
        kafka.delete_before(group.topic, 0, 15)
        with pytest.raises(ProducerError, match=r"15 messages of .* were removed by retention"):
            group.take(source)


@on_apache_kafka
def test_an_expired_retry_is_superseded(kafka, group, caplog):
    lease, messages = group.hold(fill=10)
    retry = Verdict(Action.RETRY, 0.0, "again", "process")
    group.settle(lease, messages, {messages[3].message_id: retry})
    kafka.delete_before(group.topic, 0, 8)

    assert offsets(group.drain()) == [8, 9]
    assert group.claim().failed == {}
    assert group.committed() == {0: 10}
    assert f"{group.topic}-0-3 was deleted before it was retried" in caplog.text


def test_an_interrupted_fetch_loses_nothing(group, monkeypatch):
    # Given a fetch that is interrupted when it has taken messages from the client
    group.fill(30)
    with group.source() as source:
        taken = list(source.receive(5, timeout=0.0))
        consume = source._cluster.consume

        def interrupted(most: int, timeout: float) -> Any:
            consume(most, timeout)
            raise KeyboardInterrupt

        monkeypatch.setattr(source._cluster, "consume", interrupted)
        with pytest.raises(KeyboardInterrupt):
            source.receive(5, timeout=0.0)
        monkeypatch.setattr(source._cluster, "consume", consume)
        taken += group.take(source)

    assert offsets(taken) == list(range(30))


def test_a_failed_watermark_query_loses_nothing(group, monkeypatch):
    # Given a broker that does not respond after a fetch of messages beyond the claim
    monkeypatch.setattr("airflow_broadway.producers.kafka.reader._AHEAD_FIRST", 10)
    group.fill(30)
    with group.source() as source:
        taken = list(source.receive(5, timeout=0.0))

        def unavailable(place: Any) -> Any:
            raise ProducerUnavailable("no response")

        with monkeypatch.context() as patch:
            patch.setattr(source._cluster, "ends", unavailable)
            with pytest.raises(ProducerUnavailable):
                source.receive(25, timeout=0.0)
        # When the run tries again, as it may
        taken += group.take(source)

    assert offsets(taken) == list(range(30))


def test_any_process_releases_a_dead_process_messages(group):
    group.fill(3)
    with group.source("g") as source:
        opened = source.lease
        group.take(source, 2)

        report = group.carry_out(opened, Settlement(rest=RELEASE))

    assert report.released == 3  # the number of delivered messages of the claim is unknown
    assert [m.redelivered for m in group.drain()] == [True, True, True]


def test_an_uncommitted_claim_loses_nothing(kafka_mock, tmp_path):
    group = KafkaGroup(kafka_mock, tmp_path)
    group.fill(5)
    with group.source() as source:
        kafka_mock.tell("push_request_errors_array", 8, [30])
        with pytest.raises(ProducerError, match="the group is not allowed"):
            source.receive(5, timeout=0.0)

        messages = group.take(source)

    assert (offsets(messages), any(m.redelivered for m in messages)) == ([0, 1, 2, 3, 4], False)


def test_log_timestamps_are_utc(group):
    before = datetime.now(UTC).timestamp() - 60
    group.fill(1)

    [message] = group.drain()

    assert before < message.metadata["ts"] / 1000 < before + 120


@pytest.mark.parametrize("index", [None, 0, 1])
@pytest.mark.parametrize("kind", [ProcessTask, UnstagedTask])
def test_an_unmapped_task_reads_all_partitions(kafka_mock, tmp_path, kind, index):
    # Given a producer for two tasks, and an operator that is one of them, or the only one
    group = KafkaGroup(kafka_mock, tmp_path, partitions=3, concurrency=2)
    group.fill(9)
    pipeline = type("Orders", (Broadway,), {"producer": group.producer()})()
    store = Store.open(f"file://{tmp_path}/staging")
    run = StagedRun(store, pipeline="Orders", dag_id="d", run_id="r")
    task = Task(dag_id="d", run_id="r", task_id="t")

    done = kind(run, pipeline, task, Ports(), index=index, budget=Budget()).run()

    assert done.reference["received"] == {None: 9, 0: 6, 1: 3}[index]
