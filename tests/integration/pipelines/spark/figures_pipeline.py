"""A Spark pipeline in a module of its own: messages ``{"n": 1, "price": 2.5}``."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, RetryPolicy
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.spark import failed


class Figures(Broadway):
    producer: Any = SqliteProducer(
        queue="puppets", conn_id="puppets", retry=RetryPolicy(max_attempts=1)
    )
    processors = Processors(concurrency=1, max_demand=20)
    batchers = {
        "default": Batcher(batch_size=10, schema="n long not null, price double"),
        "other": Batcher(batch_size=10, schema="n long"),
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        body = json.loads(message.data)
        return message.put_data(body).put_batcher(body.pop("to", "default"))

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        rows = messages.select("message_id", "data.*")
        rows.write.mode("overwrite").parquet(batch_info.path(context["output"], batcher))
        return failed(messages.where("data.n % 7 = 0"), reason="divisible by seven")


class Interrupted(Figures):
    """The same; the first batch kills its driver once its rows are written."""

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        result = super().handle_batch(batcher, messages, batch_info, context)
        marker = Path(context["output"]) / "_killed"
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result
