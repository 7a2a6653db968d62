"""Hosts whose clocks differ by as much as the lease lasts, at a real SQS and a real S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.formats.store_clock import StoreClock
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.sensors.ack import BroadwayAckSensor
from tests.conformance.tasks import Tasks
from tests.s3_server import S3Server, s3_server
from tests.sqs_fixtures import wanted_sqs

pytestmark = pytest.mark.broker

LEASE = 300.0


class Timed(Broadway):
    producer = SqsProducer(queue_url="https://sqs.eu-west-1.amazonaws.com/0/replaced", lease=LEASE)
    processors = Processors(concurrency=1, max_demand=10)
    batchers = {"default": Batcher(engine="python", batch_size=10)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


@pytest.mark.parametrize("process", [-300.0, 300.0, 0.0])
@pytest.mark.parametrize("others", [0.0, 300.0])
def test_messages_are_handled_once_on_hosts_whose_clocks_differ_by_the_lease(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    process: float,
    others: float,
) -> None:
    server = wanted_sqs()
    url = server.queue()
    client = server.client()
    for number in range(20):
        client.send_message(QueueUrl=url, MessageBody=str(number))
    monkeypatch.setenv("AIRFLOW_CONN_AWS_DEFAULT", json.dumps(server.connection()))
    pipeline = Timed(producer={"queue_url": url})
    about: dict[str, Any] = {"pipeline": pipeline, "staging": f"file://{tmp_path}/staging"}
    tasks = Tasks()
    tasks.task_ids = ["process", "late"]

    def run(offset: float, operator: Any) -> Any:
        host = StoreClock(SystemClock(), offset)
        monkeypatch.setattr("airflow_broadway.adapters.task.SystemClock", lambda: host)
        caplog.clear()
        returned = tasks.execute(operator)
        lines = [each for each in caplog.records if "The clock of host" in each.getMessage()]
        assert len(lines) == bool(offset)
        return returned

    reference = run(process, BroadwayProcessorOperator(task_id="process", **about))
    assert reference["received"] == 20
    run(
        others,
        BroadwayBatcherOperator(task_id="late", batcher="default", processed=[reference], **about),
    )
    looked = run(others, BroadwayAckSensor(task_id="ack", watch=["process", "late"], **about))

    assert looked["acked"] == looked["received"] == 20
    assert server.depth(url) == (0, 0, 0)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    with s3_server() as running:
        yield running


def test_a_bucket_has_a_clock_for_two_requests(s3: S3Server) -> None:
    store = s3.store(s3.root())
    host = SystemClock()
    store.clock(60.0, host)  # the root is made
    with s3.counted() as requests:
        judged = store.clock(60.0, host)
        assert abs((judged.now() - host.now()).total_seconds()) < 0.001
    assert requests.total() == 2

    judged = store.clock(60.0, StoreClock(host, -600.0))
    assert abs((judged.now() - host.now()).total_seconds()) < 2.0
