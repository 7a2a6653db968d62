"""A pipeline of one stage, which fails the messages that ask for it."""

from __future__ import annotations

from typing import Any

from airflow_broadway import Broadway, Message
from airflow_broadway.producers.sqlite import SqliteProducer


class Orders(Broadway):
    producer = SqliteProducer(queue="orders", conn_id="letters_queue")

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data == b"bad":
            return message.configure_ack(on_failure="dead_letter").failed("told to fail")
        return message
