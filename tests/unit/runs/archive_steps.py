"""Runs of a pipeline with an archive, as plain steps: live runs and backfills."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow_broadway import Archive, Batcher, BatchInfo, Broadway, Message, Processors, RetryPolicy
from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.model.run_source import ARCHIVE, Interval, RunSource
from airflow_broadway.core.reference import load_ref, make_ref
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.tasks import BatchTask, ProcessTask
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.archive.table import archive_folder
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Folder, Store

NINE = datetime(2013, 1, 1, 9, tzinfo=UTC)


def scheduled(message: Message) -> datetime:
    """The time that a message tells of itself: so many minutes after nine."""
    return NINE + timedelta(minutes=json.loads(message.data)["minute"])


def upper(message: Message) -> Message:
    """A transformer, of which the archive is to see nothing."""
    return message.put_data(message.data.upper())


class Minutes(Broadway):
    """Writes one file per batch, with the source of the run."""

    producer = SqliteProducer(
        queue="minutes",
        path="/replaced",
        transformer=upper,
        retry=RetryPolicy(max_attempts=2, backoff=0.0, jitter=0.0),
    )
    processors = Processors(concurrency=2, max_demand=4)
    batchers = {"default": Batcher(engine="python", batch_size=4, batch_timeout=None)}
    archive = Archive(time=scheduled)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        document = json.loads(message.data.lower())
        if document.get("fails") == "process":
            return message.failed("sour")
        return message.put_data({**document, "metadata": dict(message.metadata)})

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        source = self.run.source
        record = {
            "batch_id": batch_info.batch_id,
            "run_id": self.run.run_id,
            "source": source.kind,
            "interval": None if source.interval is None else str(source.interval),
            "rows": [[message.message_id, message.data["minute"]] for message in messages],
            "redelivered": batch_info.redelivered,
        }
        folder = Path(context["sink"]) / self.run.run_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{batch_info.batch_id}.json").write_text(json.dumps(record))
        return [
            message.failed("spilt") if message.data.get("fails") else message
            for message in messages
        ]


class World:
    """A queue, a staging root and a sink below a folder."""

    def __init__(self, folder: Path, pipeline: type[Broadway] = Minutes, **options: Any) -> None:
        self.folder = folder
        self.store = Store.open(f"file://{folder}/staging")
        self.ref = make_ref(pipeline)
        self.ref["options"] = {
            "producer": {"path": str(folder / "queue.db")},
            "context": {"sink": str(folder / "sink")},
            **options,
        }
        self.over: set[str] = set()
        #: Whether batches may be handled in a fork.
        self.forks = True
        with self.queue() as queue:
            queue.create()

    @property
    def archive(self) -> Folder:
        return archive_folder(self.store, self.pipeline("any").name)

    def pipeline(self, run_id: str) -> Broadway:
        pipeline = load_ref(self.ref, RunInfo(dag_id="d", run_id=run_id))
        assert isinstance(pipeline, Broadway)
        return pipeline

    def queue(self) -> SqliteQueue:
        return SqliteQueue(self.folder / "queue.db", "minutes")

    def send(self, *messages: Mapping[str, Any]) -> None:
        with self.queue() as queue:
            queue.send([json.dumps(message).encode() for message in messages])

    def minutes(self, *minutes: int) -> None:
        self.send(*({"minute": minute} for minute in minutes))

    def live(self, *minutes: int, run_id: str = "live") -> dict[str, Any]:
        """A whole live run of these messages."""
        self.minutes(*minutes)
        return self.run(run_id).all()

    def depth(self) -> QueueDepth:
        with self.queue() as queue:
            return queue.depth()

    def run(self, run_id: str, source: RunSource | None = None, clock: Clock | None = None) -> Run:
        return Run(self, run_id, source or RunSource(), clock)

    def backfill(self, run_id: str, start: int = 0, end: int = 60) -> dict[str, Any]:
        """A whole run of the minutes from ``start`` to before ``end``."""
        return self.run(run_id, of_minutes(start, end)).all()

    def sink(self, run_id: str) -> list[dict[str, Any]]:
        """The files that a run wrote, one per batch."""
        files = (self.folder / "sink" / run_id).glob("*.json")
        document = [json.loads(file.read_text()) for file in files]
        return sorted(document, key=lambda batch: (batch["rows"][0][1], batch["batch_id"]))

    def rows(self, run_id: str) -> list[int]:
        return [minute for batch in self.sink(run_id) for _, minute in batch["rows"]]


def of_minutes(start: int, end: int) -> RunSource:
    """The archive's minutes after nine."""
    first, last = (NINE + timedelta(minutes=minute) for minute in (start, end))
    return RunSource(kind=ARCHIVE, interval=Interval(first, last))


class Run:
    """One run, task by task."""

    def __init__(self, world: World, run_id: str, source: RunSource, clock: Clock | None) -> None:
        self.world = world
        self.run_id = run_id
        self.source = source
        self.pipeline = world.pipeline(run_id)
        self.ports = Ports(is_over=world.over.__contains__)
        self.staged = StagedRun(
            world.store, pipeline=self.pipeline.name, dag_id="d", run_id=run_id, clock=clock
        )
        self.references: list[dict[str, Any]] = []

    def in_dag(self, dag_id: str) -> None:
        """Make it a run of another Dag."""
        self.staged = StagedRun(
            self.world.store, pipeline=self.pipeline.name, dag_id=dag_id, run_id=self.run_id
        )

    def task(self, task_id: str, index: int = -1) -> Task:
        return Task(
            dag_id=self.staged.dag_id,
            run_id=self.run_id,
            task_id=task_id,
            map_index=index,
            forks=self.world.forks,
        )

    def process(self, index: int = 0) -> dict[str, Any]:
        process_task = ProcessTask(
            self.staged,
            self.pipeline,
            self.task("process", index),
            self.ports,
            index=index,
            budget=Budget(),
            source=self.source,
        )
        self.references.append(process_task.run().reference)
        return self.references[-1]

    def batch(self, batcher: str = "default") -> Any:
        batch_task = BatchTask(
            self.staged, self.pipeline, self.task(f"batch.{batcher}"), self.ports, batcher=batcher
        )
        plan = batch_task.plan(self.references, label="1")
        return None if plan is None else batch_task.handle(plan)

    def ack(self) -> dict[str, Any]:
        watcher = RunWatcher(self.staged, self.pipeline, ports=self.ports)
        try:
            watcher.settle(final=True)
            return watcher.report(failed_tasks=())
        finally:
            watcher.close()

    def all(self) -> dict[str, Any]:
        self.process()
        self.batch()
        self.world.over.add(self.run_id)
        return self.ack()
