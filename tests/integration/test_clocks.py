"""Hosts whose clocks differ by as much as the lease lasts, at real brokers and a real S3."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.formats.store_clock import StoreClock
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.producers.kafka import KafkaProducer
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.sensors.ack import BroadwayAckSensor
from tests.conformance.tasks import Tasks
from tests.kafka_fixtures import session_kafka
from tests.kafka_server import nearest_kafka
from tests.pubsub_fixtures import session_emulator
from tests.pubsub_server import StubServer, find_emulator
from tests.s3_server import s3_server
from tests.sqs_fixtures import wanted_sqs

pytestmark = pytest.mark.broker

LEASE = 300.0


class Timed(Broadway):
    producer: Producer = SqsProducer(
        queue_url="https://sqs.eu-west-1.amazonaws.com/0/replaced", lease=LEASE
    )
    processors = Processors(concurrency=1, max_demand=10)
    batchers = {"default": Batcher(engine="python", batch_size=10)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class TimedPubSub(Timed):
    producer = PubSubProducer(subscription="replaced", conn_id=None, lease=LEASE)


class TimedKafka(Timed):
    producer = KafkaProducer(
        group_id="timed",
        topics=["replaced"],
        conn_id="timed",
        offset_reset_policy="earliest",
        on_failure="ack",
        lease=LEASE,
    )


Place = tuple[Broadway, Callable[[], int]]


@contextmanager
def sqs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    server = wanted_sqs()
    url, client = server.queue(), server.client()
    for number in range(20):
        client.send_message(QueueUrl=url, MessageBody=str(number))
    monkeypatch.setenv("AIRFLOW_CONN_AWS_DEFAULT", json.dumps(server.connection()))
    yield Timed(producer={"queue_url": url}), lambda: sum(server.depth(url))


@contextmanager
def pubsub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    server = session_emulator() if find_emulator() else StubServer()
    topic = server.topic()
    name = server.subscription(topic)
    server.publish(topic, [b"%d" % number for number in range(20)])
    pipeline = TimedPubSub(producer={"subscription": name, **server.options})
    yield pipeline, lambda: len(server.pull(name))


@contextmanager
def kafka(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    server = session_kafka(nearest_kafka())
    topic = server.topic(f"timed-{uuid.uuid4().hex[:12]}", 1)
    server.fill(topic, [b"%d" % number for number in range(20)])
    monkeypatch.setenv("AIRFLOW_CONN_TIMED", json.dumps(server.connection()))
    pipeline = TimedKafka(producer={"topics": [topic], "group_id": topic})
    yield pipeline, lambda: 20 - server.committed(topic, topic)[0][0]


@pytest.mark.parametrize("place", [sqs, pubsub, kafka])
@pytest.mark.parametrize("process", [-300.0, 300.0, 0.0])
@pytest.mark.parametrize("others", [0.0, 300.0])
def test_clock_skew_of_a_lease_repeats_no_message(
    tmp_path, monkeypatch, caplog, process, others, place
):
    with place(monkeypatch) as (pipeline, left):
        check(pipeline, left, tmp_path, monkeypatch, caplog, process, others)


def check(
    pipeline: Broadway,
    left: Callable[[], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    process: float,
    others: float,
) -> None:
    kwargs: dict[str, Any] = {"pipeline": pipeline, "staging": f"file://{tmp_path}/staging"}
    tasks = Tasks()
    tasks.task_ids = ["process", "late"]

    def run(offset: float, operator: Any) -> Any:
        host = StoreClock(SystemClock(), offset)
        monkeypatch.setattr("airflow_broadway.adapters.host.SystemClock", lambda: host)
        caplog.clear()
        returned = tasks.execute(operator)
        lines = [record for record in caplog.records if "The clock of host" in record.getMessage()]
        assert len(lines) == bool(offset)
        return returned

    reference = run(process, BroadwayProcessorOperator(task_id="process", **kwargs))
    assert reference["received"] == 20
    run(
        others,
        BroadwayBatcherOperator(task_id="late", batcher="default", processed=[reference], **kwargs),
    )
    settled = run(others, BroadwayAckSensor(task_id="ack", watch=["process", "late"], **kwargs))

    assert settled["acked"] == settled["received"] == 20
    assert left() == 0


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("s3fs")
    with s3_server() as running:
        yield running


def test_reading_a_buckets_clock_costs_two_requests(s3):
    store = s3.store(s3.root())
    host = SystemClock()
    store.clock(60.0, host)  # creates the root
    with s3.counted() as requests:
        adjusted = store.clock(60.0, host)
        assert abs((adjusted.now() - host.now()).total_seconds()) < 0.001
    assert requests.total() == 2

    adjusted = store.clock(60.0, StoreClock(host, -600.0))
    assert abs((adjusted.now() - host.now()).total_seconds()) < 2.0
