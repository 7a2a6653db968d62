"""A pipeline with batches on a Spark Connect server, which imports only this module."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from airflow_broadway import Batcher, Broadway, Message, Processors
from airflow_broadway.producers import SqliteProducer
from airflow_broadway.sinks import ParquetFolder


class ConnectPipeline(Broadway):
    """Writes rows with the message and the time of the callback."""

    producer = SqliteProducer(queue="connect_sqlite_parquet", conn_id="warm_sqlite")
    processors = Processors(concurrency=1, max_demand=500)
    batchers = {
        "default": Batcher(
            schema="n bigint, sent double, handled double",
            batch_timeout=0.2,
            sink=ParquetFolder(path=f"{os.environ.get('WARM_TABLES')}/connect_sqlite_parquet"),
        )
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data({**json.loads(message.data), "handled": time.time()})
