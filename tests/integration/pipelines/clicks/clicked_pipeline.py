"""A pipeline whose batches wait or die while certain files are next to its call log."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.sqlite import SqliteProducer

#: Messages in a batch.
SIZE = 10
#: The asset that Spark's batches change.
OUTLET = "clicked-table"


class Clicked(Broadway):
    producer: Any = SqliteProducer(queue="replaced", conn_id="clicked_queue")
    batchers = {"default": Batcher(engine="python", batch_size=SIZE, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data({"n": int(message.data)})

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        numbers = sorted(message.data["n"] for message in messages)
        self._record_call(numbers, batch_info, Path(context["folder"]))
        return messages

    @staticmethod
    def _record_call(numbers: list[int], batch_info: BatchInfo, folder: Path) -> None:
        call = {
            "numbers": numbers,
            "batch_id": batch_info.batch_id,
            "redelivered": batch_info.redelivered,
        }
        with (folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(call) + "\n")
        if numbers[0] < SIZE:
            return
        # Only batches after the first wait, or die.
        while (folder / "wait").exists():
            time.sleep(0.1)
        if (folder / "die").exists():
            os._exit(9)


class ClickedSpark(Clicked):
    batchers = {"default": Batcher(batch_size=SIZE, schema="n long", outlets=[OUTLET])}

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        numbers = sorted(row[0] for row in messages.select("data.n").collect())
        self._record_call(numbers, batch_info, Path(context["folder"]))


class RabbitClicked(Clicked):
    producer: Any = RabbitMQProducer(queue="replaced", conn_id="clicked_rabbitmq", lease=900.0)


class RabbitClickedSpark(ClickedSpark):
    producer: Any = RabbitClicked.producer


class RabbitClickedLapse(ClickedSpark):
    """Its lease ends while a batch waits."""

    producer: Any = RabbitMQProducer(queue="replaced", conn_id="clicked_rabbitmq", lease=180.0)
