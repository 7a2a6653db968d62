"""A pipeline whose one batch is at work until a file is there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message
from airflow_broadway.producers.rabbitmq import RabbitMQProducer


class Linked(Broadway):
    producer = RabbitMQProducer(queue="linked", conn_id="links_rabbitmq")
    batchers = {"default": Batcher(schema="n int not null")}
    context = {"go": ""}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data({"n": int(message.data)})

    def handle_batch(
        self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any
    ) -> None:
        assert messages.count() == 3
        deadline = time.monotonic() + 120
        while not Path(context["go"]).exists() and time.monotonic() < deadline:
            time.sleep(0.2)
