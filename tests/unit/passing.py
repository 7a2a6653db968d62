"""The base of the tests' pipelines."""

from __future__ import annotations

from typing import Any

from airflow_broadway import BatchInfo, Broadway, Message


class Passing(Broadway):
    """Its callbacks return their arguments."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        return messages
