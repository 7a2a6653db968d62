"""Flights that are kept by their scheduled hour, and written to a folder a day: files that a live
run and a backfill both write.  ``docs/backfills.md`` shows it.
"""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow_broadway import (
    Archive,
    Batcher,
    BatchInfo,
    Broadway,
    Interval,
    Message,
    Processors,
    PythonBatch,
)
from airflow_broadway.producers.sqlite import SqliteProducer


def scheduled_hour(message: Message) -> datetime:
    return datetime.fromisoformat(json.loads(message.data)["time_hour"])


class KeptFlights(Broadway):
    producer = SqliteProducer(queue="flights", conn_id="flights_queue")
    processors = Processors(concurrency=1, max_demand=1_000)
    batchers = {"default": Batcher(engine="python", batch_size=1_000, batch_timeout=None)}
    archive = Archive(time=scheduled_hour)
    context = {"output": "/data/flights"}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        flight = json.loads(message.data)
        # One batch, one day: what handle_batch writes then lies in that day's folder.
        return message.put_data(flight).put_batch_key(flight["time_hour"][:10])

    def handle_batch(
        self, batcher: str, messages: PythonBatch, batch_info: BatchInfo, context: Any
    ) -> PythonBatch:
        folder = Path(batch_info.path(context["output"], f"date={batch_info.batch_key}"))
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(message.data) for message in messages]
        (folder / "flights.jsonl").write_text("\n".join(lines))
        return messages

    def prepare_backfill(self, interval: Interval, context: Any) -> None:
        # The interval owns whole days: what live runs, or an earlier backfill, wrote of them goes.
        day = interval.start
        while day < interval.end:
            folder = Path(context["output"], f"date={day:%Y-%m-%d}")
            shutil.rmtree(folder, ignore_errors=True)
            day += timedelta(days=1)
