"""Whole runs whose staging is a bucket, and what they ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from airflow_broadway import Batcher, Message, Processors
from airflow_broadway.core.clock import Clock
from tests.s3_server import Requests, S3Server
from tests.unit.runs.steps import Run, Sums


class Small(Sums):
    """Small batches in plain Python; of every 50 messages one fails in its batch."""

    processors = Processors(concurrency=1, max_demand=500)
    batchers = {"default": Batcher(engine="python", batch_size=1000, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data(int(message.data))

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [each.failed("fifty") if each.data % 50 == 0 else each for each in messages]


def requests_of_a_run(
    server: S3Server,
    folder: Path,
    *,
    messages: int,
    batch_size: int,
    tasks: int = 1,
    clock: Clock | None = None,
) -> Iterator[tuple[str, Requests]]:
    """Run all steps of a run; each with what it asked of the bucket.

    Each step has a client of its own, as the tasks of a run have.

    :param tasks: Process tasks, which share the messages.
    :param clock: What the batches go by.
    """
    uri = server.root()

    def run() -> Run:
        sizes = {"default": {"batch_size": batch_size}}
        store = server.store(uri)
        return Run(folder, pipeline=Small, store=store, clock=clock, batchers=sizes)

    with run().queue() as queue:
        for start in range(0, messages, 10_000):
            end = min(start + 10_000, messages)
            queue.send([b"%d" % number for number in range(start, end)])
    share = -(-messages // tasks)
    with server.counted() as requests:
        references = [run().process(index, max_messages=share) for index in range(tasks)]
    yield "process", requests
    with server.counted() as requests:
        counts = run().batch(*references)
    assert counts is not None
    assert counts["batches"] == -(-messages // batch_size)
    assert counts["without_outcome"] == 0
    yield "batch", requests
    with server.counted() as requests:
        report = run().ack()
    assert report["balanced"]
    assert report["totals"]["received"] == messages
    assert report["totals"]["dead_lettered"] == -(-messages // 50)
    yield "ack", requests
