"""Two pipelines of one topic whose hours are archived and backfilled: in Python, and on Spark."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow_broadway import Archive, Batcher, BatchInfo, Broadway, Interval, Message, Processors
from airflow_broadway.producers.kafka import KafkaProducer


class Hours(Broadway):
    producer = KafkaProducer(
        group_id="hours",
        topics=["hours"],
        conn_id="kafka_hours",
        order="none",
        offset_reset_policy="earliest",
        concurrency=2,
    )
    processors = Processors(concurrency=1)
    archive = Archive(time="enqueued_at")

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        hour = datetime.fromtimestamp(message.metadata["ts"] / 1000, UTC)
        message = message.put_data({"number": int(message.data)})
        return message.put_batch_key(f"{hour:%Y-%m-%dT%H}")

    def prepare_backfill(self, interval: Interval, context: Any) -> None:
        hour = interval.start
        while hour < interval.end:
            shutil.rmtree(Path(context["rows"], f"hour={hour:%Y-%m-%dT%H}"), ignore_errors=True)
            hour += timedelta(hours=1)


class HoursInPython(Hours):
    batchers = {"default": Batcher(engine="python", batch_size=30, batch_timeout=None)}

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        folder = Path(batch_info.path(context["rows"], f"hour={batch_info.batch_key}"))
        folder.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps(message.data) for message in messages]
        (folder / "rows.json").write_text("\n".join(rows))
        return messages


class HoursOnSpark(Hours):
    batchers = {"default": Batcher(batch_size=30, schema="number long")}

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        folder = batch_info.path(context["rows"], f"hour={batch_info.batch_key}")
        messages.select("data.number").write.mode("overwrite").json(folder)
