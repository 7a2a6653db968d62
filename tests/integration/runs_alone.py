"""One task of a run, for a process that can import neither Airflow nor pyspark.

Its arguments are FOLDER TASK RUN TRY: it runs the task ``process``, ``batch`` or ``ack`` of a run
on the queue and the staging root in FOLDER, and prints its result; or FOLDER ``look`` ID.

A callback that reaches the number in ``FOLDER/stop-at-<stage>`` creates a file, and waits to be
killed.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, RetryPolicy
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.runs.ports import Ports, Task
from airflow_broadway.runs.reading.message import find_message
from airflow_broadway.runs.reading.runs import iter_runs, list_runs
from airflow_broadway.runs.tasks import BatchTask, ProcessTask
from airflow_broadway.runs.watch import RunWatcher
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store

DAG = "alone"
QUEUE = "numbers"


class Numbers(Broadway):
    """Fails numbers divisible by 7 in the processor, and by 5 in the batch."""

    producer: Any = SqliteProducer(queue=QUEUE, path="/given", retry=RetryPolicy(max_attempts=1))
    processors = Processors(concurrency=2, max_demand=10)
    batchers = {"default": Batcher(engine="python", batch_size=10, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = int(message.data)
        _wait_to_be_killed(context["folder"], "process", [number])
        message = message.put_data(number)
        return message.failed("seven") if number % 7 == 0 else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        with closing(sqlite3.connect(f"{context['folder']}/sink.db", timeout=60.0)) as db, db:
            db.execute("PRAGMA synchronous=FULL")
            db.executemany(
                "INSERT INTO handled VALUES (?, ?, ?, ?)",
                [
                    (message.message_id, message.data, message.redelivered, batch_info.batch_id)
                    for message in messages
                ],
            )
        _wait_to_be_killed(context["folder"], "batch", [message.data for message in messages])
        return [
            message.failed("five") if message.data % 5 == 0 else message for message in messages
        ]


def _wait_to_be_killed(folder: str, stage: str, numbers: Sequence[int]) -> None:
    stop_file = Path(folder, f"stop-at-{stage}")
    if stop_file.exists() and int(stop_file.read_text()) in numbers:
        Path(folder, f"at-{stage}").touch()
        time.sleep(60.0)


def run_task(folder: str, task_id: str, run_id: str, try_number: int) -> Any:
    """Runs one task; returns its result, as JSON."""
    pipeline = Numbers(producer={"path": f"{folder}/queue.db"}, context={"folder": folder})
    store = Store.open(f"file://{folder}/staging")
    run = StagedRun(store, pipeline="Numbers", dag_id=DAG, run_id=run_id)
    # Runs are sequential here: every other run is over.
    ports = Ports(is_over=lambda other_run: True, max_shutdown=2.0)
    task = Task(dag_id=DAG, run_id=run_id, task_id=task_id, try_number=try_number)
    if task_id == "process":
        return ProcessTask(run, pipeline, task, ports, budget=Budget(max_seconds=30.0)).run()[0]
    if task_id == "batch":
        manifests = [run.manifest(generation.generation) for generation in run.generations()]
        references = [
            {"generation": manifest.generation, "batchers": manifest.batchers}
            for manifest in manifests
            if manifest
        ]
        batch = BatchTask(run, pipeline, task, ports, batcher="default")
        plan = batch.plan(references, label=str(try_number))
        return None if plan is None else batch.handle(plan)
    watcher = RunWatcher(run, pipeline, ports=ports)
    try:
        return watcher.look(over=True)
    finally:
        watcher.close()


def look(folder: str, message_id: str) -> Any:
    """Returns the visible state of the runs, and of one message."""
    store = Store.open(f"file://{folder}/staging")
    return {
        "runs": [asdict(run) for run in list_runs(store)[0]],
        "places": [asdict(story.place) for story in find_message(iter_runs(store), message_id)],
    }


def main() -> None:
    folder, verb, name, *rest = sys.argv[1:]
    result = look(folder, name) if verb == "look" else run_task(folder, verb, name, int(rest[0]))
    print(json.dumps(result))
