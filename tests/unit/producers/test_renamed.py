"""A renamed or second pipeline marks messages that the first one received."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Broadway
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.producers.sqs import SqsProducer
from airflow_broadway.runs.ports import Ports, producer_env
from airflow_broadway.staging.store import Store
from airflow_broadway.testing import ManualClock
from airflow_broadway.testing.harness import settlement_of
from tests.fake_sqs import URL, FakeSqs, installed
from tests.unit.producers.pubsub.kit import open_subscription

MESSAGES = 100
FAILED = Verdict(Action.RETRY, 0.0, "bad", "process")


class Before(Broadway):
    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


class After(Before):
    pass


@contextmanager
def pubsub(folder: Path) -> Iterator[tuple[Producer, ManualClock]]:
    with open_subscription() as sub:
        sub.put(*map(str, range(MESSAGES)))
        endpoint = f"http://{sub.server.host}"
        yield PubSubProducer(subscription=sub.name, endpoint=endpoint), sub.clock


@contextmanager
def sqs(folder: Path) -> Iterator[tuple[Producer, ManualClock]]:
    clock = ManualClock()
    fake = FakeSqs(clock)
    fake.put([*map(str, range(MESSAGES))])
    with installed(fake):
        yield SqsProducer(queue_url=URL, lease=600.0), clock


@contextmanager
def sqlite(folder: Path) -> Iterator[tuple[Producer, ManualClock]]:
    clock = ManualClock()
    path = str(folder / "queue.db")
    with closing(SqliteQueue(path, "orders", clock=clock)) as queue:
        queue.send([b"%d" % number for number in range(MESSAGES)])
    yield SqliteProducer(queue="orders", path=path, lease=600.0), clock


@pytest.mark.parametrize("broker", [pubsub, sqs, sqlite])
@pytest.mark.parametrize("verdict", [None, FAILED])
def test_messages_received_by_another_pipeline_are_marked(broker, verdict, tmp_path):
    store = Store.open(f"file://{tmp_path}/staging")
    with broker(tmp_path) as (producer, clock):

        def take(kind: type[Broadway], generation: str) -> list[Message]:
            pipeline = type(kind.__name__, (kind,), {"producer": producer})()
            env = producer_env(pipeline, Ports(), generation=generation, store=store, clock=clock)
            taken: list[Message] = []
            with closing(producer.source(env)) as source:
                while portion := source.secure(source.receive(1000, timeout=0.0)):
                    taken += portion
                if verdict is not None and kind is Before:
                    with closing(producer.custodian(env)) as custodian:
                        every = {message.message_id: verdict for message in taken}
                        custodian.settle(source.lease, settlement_of(taken, every))
            return taken

        before = take(Before, "g1")
        clock.advance(601.0)
        after = take(After, "g2")

    assert len(before) == len(after) == MESSAGES
    assert not any(message.redelivered for message in before)
    assert all(message.redelivered for message in after)
    assert {message.attempt for message in after} == {1 if verdict is None else 2}
