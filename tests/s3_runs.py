"""Runs with staging in a bucket, and their requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from airflow_broadway import Batcher, Message, Processors
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.report import CLASSES
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.tasks import BatchTask, ProcessTask
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.names import encode_name
from airflow_broadway.staging.run_folder import StagedRun
from tests.s3_server import Requests, S3Server
from tests.unit.runs.steps import Run, Sums


class Small(Sums):
    """Small batches in plain Python; of every 50 messages one fails in its batch."""

    processors = Processors(concurrency=1, max_demand=500)
    batchers = {"default": Batcher(engine="python", batch_size=1000, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data(int(message.data))

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [item.failed("fifty") if item.data % 50 == 0 else item for item in messages]


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


def requests_of_tasks(
    server: S3Server, uri: str, folder: Path, run_id: str, *, messages: int, batch_size: int
) -> dict[str, Requests]:
    """Runs the tasks of a run with two producers, each as its operator does; counts their requests.

    The sensor looks twice: while the first task runs, and at the end.

    :param folder: The folder of the queue, which exists.
    """
    queue = {"path": str(folder / "queue.db"), "queue": "sums"}
    pipeline = Small(producer=queue, batchers={"default": {"batch_size": batch_size}})
    requests: dict[str, Requests] = {}

    def staged() -> StagedRun:
        store = server.store(uri)
        clock = store.clock(300.0, SystemClock())
        return StagedRun(store, pipeline="Small", dag_id="sums", run_id=run_id, clock=clock)

    def task(task_id: str, index: int = -1) -> Task:
        return Task(dag_id="sums", run_id=run_id, task_id=task_id, map_index=index)

    def look(over: bool) -> dict[str, Any] | None:
        watcher = RunWatcher(staged(), pipeline, ports=ports)
        try:
            return watcher.look(over=over, processed=references if over else ())
        finally:
            watcher.close()

    ports = Ports(is_over=lambda other: True)
    references: list[dict[str, Any]] = []
    with server.counted() as requests["first look"]:
        look(over=False)
    with server.counted() as requests["process"]:
        for index in range(2):
            budget = Budget(max_messages=-(-messages // 2) or 1, max_seconds=60.0, idle_seconds=0.0)
            pulled = ProcessTask(staged(), pipeline, task("process", index), ports, budget=budget)
            references.append(pulled.run().reference)
    if messages:
        with server.counted() as requests["batch"]:
            batch = BatchTask(staged(), pipeline, task("batch"), ports, batcher="default")
            plan = batch.plan(references, label="1")
            assert plan is not None
            assert batch.handle(plan) is not None
    with server.counted() as requests["ack"]:
        report = look(over=True)
    assert report is not None
    assert (report["balanced"], report["totals"]["received"]) == (True, messages)
    return requests


def put_past_runs(uri: str, count: int) -> None:
    """Puts the files of empty runs that balanced a minute ago and earlier into a bucket."""
    bucket, _, root = uri.removeprefix("s3://").partition("/")
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    now = SystemClock().now()
    for number in range(count):
        run = encode_name(f"past-{number}")
        at = now - timedelta(minutes=1 + number / 10)
        ids = {"pipeline": "Small", "dag_id": "sums", "run_id": f"past-{number}"}
        counts = {"totals": dict.fromkeys(("received", *CLASSES, "failed"), 0), "balanced": True}
        report = json.dumps({**ids, **counts, "at": at.isoformat()}).encode()
        backend.put_object(bucket, f"{root}/Small/sums/{run}/report.json", report)
        mark = f"{root}/Small/sums/_balanced/{at:%Y%m%dT%H%M%S}-{run}.json"
        backend.put_object(bucket, mark, f'{{"run_id": "past-{number}"}}'.encode())
