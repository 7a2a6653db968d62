"""The cost of failed messages in the process stage, compared with successful ones."""

from __future__ import annotations

import io
import logging
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.stages.receiving import Budget
from airflow_broadway.producers.sqlite import SqliteProducer, SqliteQueue
from airflow_broadway.runs.process import Process
from airflow_broadway.staging.run_folder import StagedRun
from airflow_broadway.staging.store import Store
from tests.benchmarks.figures import rate

MESSAGES = 50_000


class Good(Broadway):
    """Reads numbers."""

    producer = SqliteProducer(queue="bench", path="/replaced")
    processors = Processors(concurrency=1, max_demand=500)
    batchers = {"default": Batcher(engine="python", batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data({"number": int(message.data)})

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class Failing(Good):
    """Fails every message, which is not a number."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data({"number": int(b"x" + message.data)})


def _once(kind: type[Broadway], messages: int) -> tuple[float, int]:
    """Runs a process stage; returns its seconds and its number of log lines."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    root = logging.getLogger("airflow_broadway")
    root.addHandler(handler)
    root.propagate, before = False, root.propagate
    try:
        with tempfile.TemporaryDirectory() as folder:
            with SqliteQueue(Path(folder) / "queue.db", "bench") as queue:
                queue.send([b"%d" % number for number in range(messages)])
            run = StagedRun(
                Store.open(f"file://{folder}/staging"), pipeline="b", dag_id="d", run_id="r"
            )
            owner = {"task_id": "process", "map_index": 0, "try_number": 1}
            env = ProducerEnv(generation=uuid.uuid4().hex, owner=owner, clock=SystemClock())
            pipeline = kind(producer={"path": f"{folder}/queue.db"})
            started = time.perf_counter()
            Process(run, pipeline, env=env, budget=Budget()).run()
            return time.perf_counter() - started, len(written.getvalue().splitlines())
    finally:
        root.propagate = before
        root.removeHandler(handler)


def bench_failing(messages: int = MESSAGES, tries: int = 5) -> list[dict[str, Any]]:
    """Messages a second where all succeed and where all fail, medians; and the lines of the log."""
    _once(Good, 100)
    # In turn, so that what else the machine does meets both.
    pairs = [(_once(Good, messages), _once(Failing, messages)) for _ in range(tries)]
    good = statistics.median(pair[0][0] for pair in pairs)
    bad = statistics.median(pair[1][0] for pair in pairs)
    lines = pairs[0][1][1]
    return [
        rate("process.good", messages, good),
        rate("process.failing", messages, bad)
        | {"ratio": round(good / bad, 3), "of": "process.good"},
        {"name": "process.failing.log", "value": lines, "unit": "lines"},
    ]
