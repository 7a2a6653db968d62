"""A dry run at real brokers, from the look to the report; its receives are counted from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from airflow_broadway import Broadway, Message
from airflow_broadway.core.custody.run_summary import lines_of
from airflow_broadway.core.model.run_source import DEAD_LETTERS, RunSource
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.sources.dry_run import DryRun
from airflow_broadway.runs.tasks import ProcessTask
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from tests.rabbitmq_fixtures import wanted_server
from tests.rabbitmq_place import Connections, Place
from tests.sqs_fixtures import wanted_sqs
from tests.sqs_server import Connections as SqsConnections


class Orders(Broadway):
    """Fails the messages with the body ``bad``."""

    producer: Any = RabbitMQProducer(queue="replaced")

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("the body is bad") if message.data == b"bad" else message


class Queue(NamedTuple):
    """A queue with five messages.

    :param left: Returns the broker's own counts of ready and held messages.
    :param untouched: Returns whether the next message was never delivered.
    """

    pipeline: Orders
    connections: Any
    left: Callable[[], tuple[int, int]]
    untouched: Callable[[], bool]


def at_rabbitmq(folder: Path) -> Queue:
    place = Place(wanted_server(), folder)
    place.declare()
    place.send(b"bad", *(b"%d" % number for number in range(4)))
    pipeline = Orders()
    pipeline.producer = place.producer(on_failure="dead_letter")

    def untouched() -> bool:
        with place.channel() as channel:
            return not channel.basic_get(place.name)[0].redelivered

    return Queue(
        pipeline,
        Connections(host=place.host, port=place.port),
        lambda: (place.server.count(place.name), 0),
        untouched,
    )


def at_sqs(folder: Path) -> Queue:
    server = wanted_sqs()
    url = server.queue()
    client = server.client()
    for body in map(str, range(5)):
        client.send_message(QueueUrl=url, MessageBody=body)
    pipeline = Orders()
    pipeline.producer = SqsProducer(queue_url=url)

    def untouched() -> bool:
        response = client.receive_message(QueueUrl=url, AttributeNames=["ApproximateReceiveCount"])
        return str(response["Messages"][0]["Attributes"]["ApproximateReceiveCount"]) == "1"

    return Queue(pipeline, SqsConnections(server.url), lambda: server.depth(url)[:2], untouched)


class Run:
    """A run of the pipeline, task by task."""

    def __init__(self, queue: Queue, store: Store, run_id: str, source: RunSource) -> None:
        self.pipeline = queue.pipeline
        self.ports = Ports(connections=queue.connections, is_over=lambda _: True)
        self.staged = StagedRun(store, pipeline="Orders", dag_id="d", run_id=run_id)
        self.source = source
        self.options: dict[str, Any] = {
            "budget": Budget(max_messages=3, max_seconds=60.0),
            "source": source,
        }
        self.task = Task(dag_id="d", run_id=run_id, task_id="process")

    def look(self) -> dict[str, Any]:
        return DryRun(self.staged, self.pipeline, self.task, self.ports, **self.options).run()

    def work(self) -> dict[str, Any]:
        task = ProcessTask(self.staged, self.pipeline, self.task, self.ports, **self.options)
        return task.run()[0]

    def ack(self) -> dict[str, Any]:
        watcher = RunWatcher(self.staged, self.pipeline, ports=self.ports)
        try:
            report = watcher.look(over=True, last=True)
        finally:
            watcher.close()
        assert report is not None
        return dict(report)


@pytest.mark.parametrize("broker", [at_rabbitmq, at_sqs])
def test_a_dry_run_counts_what_the_next_run_receives(tmp_path, broker):
    queue = broker(tmp_path)
    store = Store.open(f"file://{tmp_path}/staging")

    # When a dry run looks at the queue
    dry = Run(queue, store, "dry", RunSource())
    result = dry.look()["look"]
    report = dry.ack()

    # Then its report has what the next run would receive
    assert result["messages"] == 5
    text = " ".join(lines_of(report))
    assert "The queue: 5 ready" in text
    assert "A run now would take 3 messages at most (max_messages=3" in text
    assert report["totals"]["received"] == 0
    # And the broker has delivered none
    assert queue.left() == (5, 0)

    # And the next run receives as many
    run = Run(queue, store, "run", RunSource())
    assert run.work()["received"] == 3
    assert run.ack()["totals"]["received"] == 3
    assert sum(queue.left()) == 2
    assert queue.untouched()


def test_a_dry_run_of_dead_letters_moves_none(tmp_path):
    # Given a dead letter at RabbitMQ
    queue = at_rabbitmq(tmp_path)
    store = Store.open(f"file://{tmp_path}/staging")
    run = Run(queue, store, "run", RunSource())
    run.work()
    assert run.ack()["totals"]["dead_lettered"] == 1

    dry = Run(queue, store, "dry", RunSource(kind=DEAD_LETTERS))
    dry.look()
    text = " ".join(lines_of(dry.ack()))

    assert "A run would send 1 dead letter back first" in text
    assert "The queue: 2 ready" in text
    assert queue.left() == (2, 0)
    again = Run(queue, store, "again", RunSource(kind=DEAD_LETTERS))
    again.look()
    assert text == " ".join(lines_of(again.ack()))
