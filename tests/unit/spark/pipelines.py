"""Pipelines that the Spark tests run; a test sets their callback as a class attribute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

from airflow_broadway import Broadway
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import Batcher
from airflow_broadway.core.model.run_info import RunInfo


class Counting(Broadway):
    """Calls ``Counting.callback``, and records its calls."""

    producer = Producer()
    batchers = {
        "default": Batcher(schema="n bigint"),
        "wide": Batcher(schema="n bigint", concurrency=3),
        "other": Batcher(schema="n bigint", concurrency=2),
        "merged": Batcher(schema="n bigint", concurrency=3, merge_keys=True),
    }

    callback: ClassVar[Callable[..., Any]] = lambda *_: None
    calls: ClassVar[list[tuple[str, BatchInfo]]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def setup(self, run: RunInfo) -> Any:
        return {"run": run.run_id}

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        with self._lock:
            self.calls.append((batcher, batch_info))
        return type(self).callback(messages, batch_info)


class Mending(Counting):
    """Also has ``handle_failed``, which calls ``Mending.mend``."""

    mend: ClassVar[Callable[[list[Message]], Any]] = lambda messages: messages
    seen: ClassVar[list[list[Message]]] = []

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        self.seen.append(messages)
        return type(self).mend(messages)  # type: ignore[no-any-return]


class Without(Broadway):
    """Has no ``handle_batch``."""

    producer = Producer()
    batchers = {"default": Batcher(schema="n bigint")}
