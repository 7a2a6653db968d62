"""The pipeline whose live runs and backfills are killed: it writes an archive, and files of rows.

A message's number determines its row and its day.  A backfill replaces the folders of its
interval's days, as in ``docs/backfills.md``.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
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
    RetryPolicy,
)
from airflow_broadway.producers.sqlite import SqliteProducer

#: The times of the messages: ``HOURS`` hours from ``BEGIN``.
BEGIN = datetime(2013, 1, 1, tzinfo=UTC)
HOURS = 96
END = BEGIN + timedelta(hours=HOURS)


def hour_of(message: Message) -> datetime:
    return BEGIN + timedelta(hours=int(message.data) % HOURS)


def is_rejected(number: int) -> bool:
    """Returns whether the message is dead-lettered before the bug is fixed."""
    return number % 20 == 1


def rows(folder: Path) -> Counter[tuple[int, bool]]:
    """Counts the written rows by number and redelivery mark."""
    counts: Counter[tuple[int, bool]] = Counter()
    for path in folder.glob("date=*/batch_id=*/rows.json"):
        counts.update((number, marked) for number, marked in json.loads(path.read_text()))
    return counts


class ArchivedPipeline(Broadway):
    producer = SqliteProducer(
        queue="killed",
        conn_id="killed_queue",
        concurrency=2,
        lease=120.0,
        retry=RetryPolicy(max_attempts=3, backoff=0.5, jitter=0.0),
    )
    processors = Processors(concurrency=2, max_demand=100)
    batchers = {"even": Batcher(engine="python", batch_size=50, batch_timeout=None)}
    archive = Archive(time=hour_of)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        # Slow enough for a kill to hit it.
        time.sleep(0.004)
        if context["refuse"] and is_rejected(int(message.data)):
            return message.configure_ack(on_failure="dead_letter").failed("rejected by its number")
        day = f"{hour_of(message):%Y-%m-%d}"
        return message.put_data(int(message.data)).put_batcher("even").put_batch_key(day)

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        folder = Path(batch_info.path(context["rows"], f"date={batch_info.batch_key}"))
        folder.mkdir(parents=True, exist_ok=True)
        rows = [(message.data, message.redelivered) for message in messages]
        (folder / "rows.json").write_text(json.dumps(rows))
        time.sleep(0.1)
        return messages

    def prepare_backfill(self, interval: Interval, context: Any) -> None:
        day = interval.start
        while day < interval.end:
            shutil.rmtree(Path(context["rows"], f"date={day:%Y-%m-%d}"), ignore_errors=True)
            day += timedelta(days=1)
