"""A pipeline that believes every word of its messages: they become batch keys, and reasons."""

from __future__ import annotations

from typing import Any

from airflow_broadway import Batcher, BatchInfo, Broadway, Message
from airflow_broadway.producers.sqlite import SqliteProducer

#: The prefix of a message that fails, unless the run has the trouble fixed; and
#: what one begins with that fails in its batch.
BAD = b"bad: "
LATE = b"late: "


class Letters(Broadway):
    producer = SqliteProducer(queue="letters", conn_id="letters_queue")
    batchers = {
        "default": Batcher(engine="python", batch_size=5),
        "rest": Batcher(engine="python", batch_size=100),
    }
    context = {"mended": "False"}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = message.configure_ack(on_failure="dead_letter")
        if message.data.startswith(BAD) and context["mended"] != "True":
            return message.failed(message.data.removeprefix(BAD).decode())
        if message.data.startswith(BAD):
            return message.put_batcher("rest")
        key = message.data.removeprefix(LATE)[:200].decode("utf-8", "replace")
        return message.put_batch_key(key)

    def handle_batch(
        self, batcher: str, messages: list[Message], batch_info: BatchInfo, context: Any
    ) -> list[Message]:
        return [
            message.failed(str(batch_info.batch_key)) if message.data.startswith(LATE) else message
            for message in messages
        ]
