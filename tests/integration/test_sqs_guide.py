"""Permissions, requests and FIFO queues of ``docs/sqs.md``, compared with the requests sent."""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore import handlers

from airflow_broadway import Batcher, Broadway, Message, Processors, RetryPolicy
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Settlement
from airflow_broadway.core.custody.verdicts import ACK
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.process import Process
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from airflow_broadway.testing import ManualClock
from tests.sqs_fixtures import wanted_sqs
from tests.sqs_server import Connections, SqsServer

pytestmark = pytest.mark.broker

GUIDE = (Path(__file__).parents[2] / "docs" / "sqs.md").read_text("utf-8")
MESSAGES = 100
#: Requests that are sent once, for any number of messages.
ONCE = {"GetQueueUrl", "GetQueueAttributes"}

#: The actions on failure of the messages that :class:`Orders` fails.
FAILING: dict[str, str] = {}
HANDLED: list[str] = []


@pytest.fixture
def server():
    FAILING.clear()
    HANDLED.clear()
    return wanted_sqs()


class Orders(Broadway):
    """Fails messages with the actions in :data:`FAILING`."""

    producer = SqsProducer(queue_name="orders", receive_interval=0.2, on_failure="retry")
    processors = Processors(concurrency=2)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        text = message.data.decode()
        HANDLED.append(text)
        action = FAILING.get(text)
        if action is None or message.redelivered:
            return message
        return message.configure_ack(on_failure=action).failed("as requested")


class HeldOrders(Orders):
    """The same with a batcher, so that messages are held until another process settles them."""

    batchers = {"default": Batcher(engine="python")}

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class BatchedOrders(HeldOrders):
    """Fails messages only in ``handle_batch``."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [Orders.handle_message(self, batcher, message, context) for message in messages]


@contextmanager
def record_requests() -> Iterator[Counter[str]]:
    """Counts the requests of every client that is created inside."""
    sent: Counter[str] = Counter()

    def see(event_name: str, **_: Any) -> None:
        sent[event_name.rpartition(".")[2]] += 1

    entry = ("before-send.sqs", see)
    handlers.BUILTIN_HANDLERS.append(entry)
    try:
        yield sent
    finally:
        handlers.BUILTIN_HANDLERS.remove(entry)


def create_queue(server: SqsServer, count: int = MESSAGES) -> str:
    """Creates a queue with ``count`` messages and a redrive policy; returns its name."""
    name = f"orders-{uuid.uuid4().hex[:12]}"
    dead = server.queue(f"{name}-dead")
    client = server.client()
    attributes = client.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])
    policy = {"deadLetterTargetArn": attributes["Attributes"]["QueueArn"], "maxReceiveCount": 10}
    url = server.queue(name, RedrivePolicy=json.dumps(policy))
    for start in range(0, count, 10):
        client.send_message_batch(
            QueueUrl=url,
            Entries=[{"Id": str(n), "MessageBody": str(n)} for n in range(start, start + 10)],
        )
    return name


class Run:
    """A run on a queue of its own, in stages."""

    def __init__(
        self, server: SqsServer, folder: Path, kind: type[Broadway], **options: Any
    ) -> None:
        store = Store.open(f"file://{folder}/{uuid.uuid4().hex}")
        self.clock = ManualClock()
        self.pipeline = kind(producer={"queue_name": create_queue(server), **options})
        self.run = StagedRun(store, pipeline=self.pipeline.name, dag_id="d", run_id="r")
        self.env = ProducerEnv(
            pipeline=self.pipeline.name,
            generation=uuid.uuid4().hex,
            owner={"dag_id": "d", "run_id": "r", "task_id": "process", "map_index": 0}
            | {"try_number": 1},
            clock=self.clock,
            shared=f"{store.uri}/.shared",
            connections=Connections(server.url),
        )

    def process(self) -> Mapping[str, Any]:
        budget = Budget(max_messages=MESSAGES)
        return Process(self.run, self.pipeline, env=self.env, budget=budget).run()

    def settle(self, *, renew: bool = False) -> None:
        [record] = self.run.generations()
        lease = self.run.lease(record)
        custodian = self.pipeline.producer.custodian(self.env)
        if renew:
            self.clock.advance(0.5 * lease.seconds)
            assert custodian.renew(lease) is not None
        report = custodian.settle(lease, Settlement(rest=ACK, expected=MESSAGES))
        custodian.close()
        assert report.acked == MESSAGES


def requests_per_message(sent: Counter[str]) -> float:
    return sum(count for name, count in sent.items() if name not in ONCE) / MESSAGES


def read_table() -> list[float]:
    """Returns the figures of the guide, from top to bottom."""
    [part] = re.findall(r"START requests -->(.*?)<!-- END requests", GUIDE, re.DOTALL)
    return [float(value) for value in re.findall(r"\| (\d\.\d+) \|", part)]


def test_a_message_costs_the_documented_requests(server, tmp_path):
    measured = []
    with record_requests() as sent:
        run = Run(server, tmp_path, HeldOrders)
        sent.clear()
        run.process()
        run.settle()
    measured.append(requests_per_message(sent))
    for action in ("retry", "dead_letter"):
        FAILING.update({str(number): action for number in range(0, MESSAGES, 10)})
        run = Run(server, tmp_path, Orders)
        with record_requests() as sent:
            run.process()
        measured.append(requests_per_message(sent))
    FAILING.clear()
    run = Run(server, tmp_path, HeldOrders)
    with record_requests() as sent:
        run.process()
        run.settle(renew=True)
    measured.append(requests_per_message(sent))
    run = Run(server, tmp_path, HeldOrders, max_number_of_messages=1)
    with record_requests() as sent:
        run.process()
        run.settle()
    measured.append(requests_per_message(sent))

    assert [round(value, 2) for value in measured] == read_table()


def test_the_guides_minimal_policy_is_sufficient_and_necessary(server, tmp_path):
    [block] = re.findall(r"```json\n(\{\n  \"Version\".*?)```", GUIDE, re.DOTALL)
    allowed = {
        action.removeprefix("sqs:")
        for statement in json.loads(block)["Statement"]
        for action in statement["Action"]
    }

    FAILING.update({"1": "retry", "2": "dead_letter", "3": "release"})
    run = Run(server, tmp_path, Orders)
    with record_requests() as sent:
        run.process()

    # The permission for a batch request is that for its single form.
    assert {name.removesuffix("Batch") for name in sent} == allowed


def test_a_process_task_with_batchers_only_receives_and_releases(server, tmp_path):
    [row] = re.findall(r"^\| `process` \|(.*?)\|", GUIDE, re.MULTILINE)

    run = Run(server, tmp_path, HeldOrders)
    with record_requests() as received:
        run.process()
    with record_requests() as settled:
        run.settle(renew=True)

    assert {name.removesuffix("Batch") for name in received} < set(re.findall(r"`(\w+)`", row))
    assert set(settled) == {"GetQueueUrl", "DeleteMessageBatch", "ChangeMessageVisibilityBatch"}


# -- FIFO ------------------------------------------------------------------------------------------


def create_ledger(server: SqsServer, kind: type[Broadway] = Orders) -> tuple[Broadway, str]:
    """Returns a pipeline on a FIFO queue with entries of two accounts, and the queue's URL."""
    name = f"ledger-{uuid.uuid4().hex[:12]}"
    dead = f"{name}-dead.fifo"
    server.queue(dead, FifoQueue="true")
    url = server.queue(f"{name}.fifo", FifoQueue="true")
    client = server.client()
    for entry in ("a1", "b1", "a2", "b2", "a3"):
        client.send_message(
            QueueUrl=url, MessageBody=entry, MessageGroupId=entry[0], MessageDeduplicationId=entry
        )
    retry = RetryPolicy(backoff=1.0, jitter=0.0)
    options = {"queue_name": f"{name}.fifo", "retry": retry, "dead_letter": dead}
    return kind(producer=options), url


def handled_of(account: str) -> list[str]:
    return [entry for entry in HANDLED if entry.startswith(account)]


@pytest.mark.parametrize(
    ("kind", "handled"),
    [
        pytest.param(Orders, ["a1", "a1", "a2", "a3"], id="failed in handle_message"),
        pytest.param(
            BatchedOrders, ["a1", "a2", "a3", "a1", "a2", "a3"], id="failed in handle_batch"
        ),
    ],
)
def test_a_retried_entry_holds_back_later_ones_of_its_group(server, kind, handled):
    FAILING["a1"] = "retry"
    pipeline, url = create_ledger(server, kind)

    first = pipeline.run_local(connections=Connections(server.url), max_messages=5)
    second = pipeline.run_local(
        connections=Connections(server.url), max_messages=3, wait_seconds=20.0
    )

    assert (first.settled.acked, first.settled.requeued, first.settled.released) == (2, 1, 2)
    assert second.settled.acked == 3
    assert handled_of("a") == handled
    assert handled_of("b") == ["b1", "b2"]
    assert server.depth(url) == (0, 0, 0)


def test_failures_behind_a_failed_entry_are_released(server):
    FAILING.update(a1="retry", a2="dead_letter", a3="retry")
    pipeline, url = create_ledger(server, BatchedOrders)

    first = pipeline.run_local(connections=Connections(server.url), max_messages=5)
    second = pipeline.run_local(
        connections=Connections(server.url), max_messages=3, wait_seconds=20.0
    )

    assert (first.settled.requeued, first.settled.released) == (1, 2)
    assert (first.settled.acked, first.settled.dead_lettered) == (2, 0)
    assert second.settled.acked == 3
    assert handled_of("a") == ["a1", "a2", "a3", "a1", "a2", "a3"]
    assert server.depth(url) == (0, 0, 0)


def test_one_run_holds_a_group_at_a_time(server):
    pipeline, url = create_ledger(server)
    env = ProducerEnv(connections=Connections(server.url))
    other_source = pipeline.producer.source(env)
    [entry] = other_source.secure(other_source.receive(1, timeout=5.0))
    assert entry.data == b"a1"

    report = pipeline.run_local(connections=Connections(server.url))

    assert report.settled.acked == 2
    assert HANDLED == ["b1", "b2"]
    assert server.depth(url) == (2, 1, 0)
    other_source.close()


def test_a_run_receives_one_batch_per_group(server):
    name = f"long-{uuid.uuid4().hex[:12]}.fifo"
    url = server.queue(name, FifoQueue="true", ContentBasedDeduplication="true")
    client = server.client()
    for number in range(25):
        client.send_message(QueueUrl=url, MessageBody=f"{number:02}", MessageGroupId="one")
    pipeline = Orders(producer={"queue_name": name, "on_failure": "noop"})

    taken = [
        pipeline.run_local(connections=Connections(server.url)).settled.acked for _ in range(3)
    ]

    assert taken == [10, 10, 5]
    assert [f"{number:02}" for number in range(25)] == HANDLED
    assert server.depth(url) == (0, 0, 0)
