"""The DAG of the matrix: every tenth message fails, the others become rows of a folder."""

from __future__ import annotations

import json
import os
from typing import Any

from airflow_broadway import Batcher, Broadway, Message
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.sinks import ParquetFolder

FOLDER = os.environ["SMOKE_FOLDER"]


class Smoke(Broadway):
    producer = SqliteProducer(queue="smoke", path=f"{FOLDER}/queue.db", on_failure="dead_letter")
    batchers = {
        "default": Batcher(
            engine="python",
            schema="n bigint",
            batch_size=25,
            sink=ParquetFolder(path=f"{FOLDER}/rows"),
        )
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        number = json.loads(message.data)["n"]
        return message.failed("a tenth") if number % 10 == 0 else message.put_data({"n": number})


dag = Smoke.dag("smoke")
