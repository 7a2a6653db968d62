"""A pipeline's batches hold the same in the test kit, in one process, and in tasks."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, RetryPolicy
from airflow_broadway.operators.batch import BroadwayBatcherOperator
from airflow_broadway.operators.process import BroadwayProcessorOperator
from airflow_broadway.operators.run import BroadwayRunOperator
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.sensors.ack import BroadwayAckSensor
from airflow_broadway.testing import PipelineDriver
from tests.conformance.tasks import Tasks


class Put(NamedTuple):
    """The changes of a message by ``handle_message``."""

    data: Any
    key: Any = "default"
    batcher: str = "plain"


PUTS = [
    Put(b"raw"),
    Put((1, {2}, Decimal("1.5"))),
    Put({1: date(2026, 1, 1), "a": None}),
    Put(float("inf")),
    Put(OrderedDict(a=(1, 2))),
    Put(object()),
    Put("keyed", b"key"),
    Put("keyed", True),
    Put("keyed", 1),
    Put("keyed", 1),
    Put("keyed", frozenset("ab")),
    Put("keyed", ("a", 1)),
    Put({"x": 1, "other": 2}, batcher="columns"),
    Put({"x": "1"}, batcher="columns"),
    Put({"x": 2}, "k", batcher="columns"),
    Put({"x": -1}, batcher="parted"),
    Put({"x": 4}, batcher="parted"),
]


def with_metadata(message: Message) -> Message:
    return Message(message.data, metadata={"headers": {"n": (int(message.data), b"\xff")}})


class Puts(Broadway):
    producer = SqliteProducer(
        queue="puts", path="/replaced", retry=RetryPolicy(max_attempts=1), transformer=with_metadata
    )
    batchers = {
        "plain": Batcher(engine="python", batch_timeout=None),
        "columns": Batcher(engine="python", batch_timeout=None, schema="x int, y string"),
        "parted": Batcher(
            engine="python",
            batch_timeout=None,
            concurrency=2,
            partition_by=lambda message: message.data["x"],
        ),
    }
    seen: list[Any] = []
    lock = threading.Lock()

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        put = PUTS[int(message.data)]
        return message.put_data(put.data).put_batch_key(put.key).put_batcher(put.batcher)

    def handle_batch(self, batcher: str, messages: Any, info: BatchInfo, context: Any) -> Any:
        contents = [
            repr((message.data, message.batch_key, dict(message.metadata))) for message in messages
        ]
        facts = batcher, repr(info.batch_key), info.partition, info.size, info.trigger.value
        with self.lock:
            self.seen.append((*facts, sorted(contents)))
        return messages

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        with self.lock:
            self.seen.extend(message.status.text.partition(" object at")[0] for message in messages)
        return messages


BODIES = [b"%d" % number for number in range(len(PUTS))]


def queued(folder: Path) -> Puts:
    with SqliteQueue(folder / "queue.db", "puts") as queue:
        queue.send(BODIES)
    return Puts(producer={"path": str(folder / "queue.db")})


def by_kit(folder: Path) -> None:
    driver = PipelineDriver(Puts)
    driver.produce([driver.message(body) for body in BODIES])
    driver.drain()


def by_run_local(folder: Path, pipeline: Broadway) -> None:
    assert pipeline.run_local().balanced


def by_one_task(folder: Path, pipeline: Broadway) -> None:
    kwargs: dict[str, Any] = {"staging": f"file://{folder}/staging", "fail_when": "never"}
    Tasks().execute(BroadwayRunOperator(task_id="run", pipeline=pipeline, **kwargs))


def by_tasks(folder: Path, pipeline: Broadway) -> None:
    tasks = Tasks()
    kwargs: dict[str, Any] = {"pipeline": pipeline, "staging": f"file://{folder}/staging"}
    names = ["process", *(f"batch.{name}" for name in pipeline.batchers)]
    tasks.task_ids = [*names, "ack"]
    processed = tasks.execute(BroadwayProcessorOperator(task_id="process", **kwargs))
    for name in pipeline.batchers:
        task = f"batch.{name}"
        tasks.execute(
            BroadwayBatcherOperator(task_id=task, batcher=name, processed=[processed], **kwargs)
        )
    tasks.execute(BroadwayAckSensor(task_id="ack", watch=names, fail_when="never", **kwargs))


WAYS = [by_run_local, by_one_task, by_tasks]


def observe(way: Callable[[Path], None], folder: Path) -> list[str]:
    Puts.seen = []
    folder.mkdir()
    way(folder)
    return sorted(map(repr, Puts.seen))


@pytest.mark.parametrize("way", WAYS)
def test_batches_and_failures_match_the_test_kit(way, tmp_path):
    expected = observe(by_kit, tmp_path / "kit")
    assert len(expected) == 12
    assert sum("Error: " in text for text in expected) == 3
    assert observe(lambda folder: way(folder, queued(folder)), tmp_path / "way") == expected


# -- callbacks that return something else ----------------------------------------------------------


def doubled(messages: list[Message]) -> list[Message]:
    return [messages[0], *messages[:-1]]


def more(messages: list[Message]) -> list[Message]:
    return [*messages, *messages]


def foreign(messages: list[Message]) -> list[Message]:
    return [
        *messages[1:],
        Message(b"x", message_id="foreign", acknowledger=messages[0].acknowledger),
    ]


def anew(messages: list[Message]) -> list[Message]:
    first = Message(messages[0].data, message_id=messages[0].message_id, status=messages[0].status)
    return [first, *messages[1:]]


def fewer(messages: list[Message]) -> list[Message]:
    return messages[1:]


def both(messages: list[Message]) -> list[Message]:
    return [messages[0], messages[0].failed("as well"), *messages[1:]]


class Odd(Broadway):
    """One callback, named by the context, changes its messages; every third message fails."""

    producer = SqliteProducer(queue="odd", path="/replaced", retry=RetryPolicy(max_attempts=1))
    processors = Processors(concurrency=1, max_demand=20)  # one chunk of ten
    batchers = {"default": Batcher(engine="python", batch_timeout=None)}

    def changed(self, callback: str, messages: list[Message], context: Any) -> list[Message]:
        name, how = context
        return globals()[how](messages) if name == callback else messages

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        return self.changed("prepare_messages", messages, context)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("third") if int(message.data) % 3 == 0 else message

    def handle_batch(self, batcher: str, messages: Any, info: BatchInfo, context: Any) -> Any:
        return self.changed("handle_batch", messages, context)

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        return self.changed("handle_failed", messages, context)


class OddPlain(Odd):
    batchers: Any = {}


def after(
    way: Callable[[Path, Any], None], folder: Path, kind: type[Odd], context: Any
) -> tuple[list[Any], list[bytes]]:
    """The dead letters with their reasons, and the messages back in the queue."""
    folder.mkdir()
    path = str(folder / "queue.db")
    with SqliteQueue(path, "odd") as queue:
        queue.send([b"%d" % number for number in range(10)])
    way(folder, kind(producer={"path": path}, context=context))
    with SqliteQueue(path, "odd") as queue:
        dead = sorted((letter.body, _without_ids(letter.reason)) for letter in queue.dead_letters())
        assert queue.depth().leased == 0
        left = [message.data for message in queue.receive("look", 20)]
    return dead, sorted(left)


def _without_ids(reason: str) -> str:
    return re.sub(r"message '[^']+'", "message …", reason)


def both_ways(messages: list[Message]) -> list[Message]:
    return [messages[0].failed("as well"), *messages]


HOWS = ["doubled", "more", "foreign", "anew", "fewer", "both", "both_ways"]
CALLBACKS = ["prepare_messages", "handle_failed", "handle_batch"]


@pytest.mark.parametrize(
    ("kind", "callback", "how"),
    [
        *((Odd, callback, how) for callback in CALLBACKS for how in HOWS),
        *((OddPlain, "handle_failed", how) for how in ("more", "foreign")),
    ],
)
def test_callbacks_returning_other_messages_behave_the_same_everywhere(
    kind, callback, how, tmp_path, caplog
):
    seen = {}
    for way in WAYS:
        caplog.clear()
        observed = after(way, tmp_path / way.__name__, kind, [callback, how])
        seen[way.__name__] = (
            observed,
            sorted({code for record in caplog.records if (code := getattr(record, "code", None))}),
        )
    first = seen["by_run_local"]
    assert seen == dict.fromkeys(seen, first)
    (dead, left), codes = first
    assert codes, "it is logged"
    if callback == "prepare_messages":
        assert (codes, len(dead), left) == (["prepare_messages_count_mismatch"], 10, [])
        return
    lost = how in ("doubled", "foreign", "fewer")
    assert len(left) == lost
    failed = 4 + (callback == "handle_batch" and how in ("anew", "both", "both_ways"))
    assert len(dead) == failed - (lost and callback == "handle_failed")
