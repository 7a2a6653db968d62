"""A pipeline whose messages control what happens to them.

A message is a JSON object, for instance ``{"n": 7, "process": "fail"}``; the keys are

=========== ========================================================================================
``n``       its number
``to``      its batcher; ``default`` unless given
``process`` ``fail``, ``raise``, ``ack``, or an action for ``configure_ack``: ``on_success=noop``…
``batch``   ``fail``, or an action
``once``    if true, all this only on the first attempt
=========== ========================================================================================
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from airflow_broadway import Batcher, BatchInfo, Broadway, Message, Processors, RetryPolicy, RunInfo
from airflow_broadway.producers.sqlite import SqliteProducer


class Puppets(Broadway):
    producer: Any = SqliteProducer(
        queue="puppets", conn_id="puppets", retry=RetryPolicy(max_attempts=2, backoff=0.0)
    )
    processors = Processors(concurrency=1, max_demand=20)
    batchers = {
        "default": Batcher(engine="python", batch_size=10, batch_timeout=None),
        "other": Batcher(engine="python", batch_size=4, batch_timeout=None),
    }

    #: What the callbacks saw in this process: (callback, batcher, batch id, numbers).
    calls: ClassVar[list[tuple[str, str, str, list[int]]]] = []
    #: The run as each callback saw it.
    runs: ClassVar[list[tuple[str, RunInfo, Any]]] = []

    def setup(self, run: RunInfo) -> Any:
        self.runs.append(("setup", run, None))
        return {"given": self.context, "run_id": run.run_id}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        self.runs.append(("handle_message", self.run, context))
        body = json.loads(message.data)
        message = message.put_data(body).put_batcher(body.get("to", "default"))
        instruction = self._read_instruction(message, "process")
        if instruction == "raise":
            raise ValueError(f"raised on {body['n']}")
        return self._follow(message, instruction)

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        self.runs.append(("handle_batch", self.run, context))
        numbers = [message.data["n"] for message in messages]
        self.calls.append(("handle_batch", batcher, batch_info.batch_id, numbers))
        return [
            self._follow(message, self._read_instruction(message, "batch")) for message in messages
        ]

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        self.runs.append(("handle_failed", self.run, context))
        return messages

    @staticmethod
    def _read_instruction(message: Message, key: str) -> str:
        if message.data.get("once") and message.attempt > 1:
            return ""
        return str(message.data.get(key, ""))

    @staticmethod
    def _follow(message: Message, instruction: str) -> Message:
        if instruction == "fail":
            return message.failed(f"failed: {message.data['n']}")
        if instruction == "ack":
            return message.ack_immediately()
        name, separator, action = instruction.partition("=")
        if separator:
            message = message.configure_ack(**{name: action})
            return (
                message.failed(f"{action}: {message.data['n']}") if "failure" in name else message
            )
        return message


class Plain(Puppets):
    """Without batchers: the process task settles by itself."""

    batchers: ClassVar[dict[str, Batcher]] = {}  # type: ignore[misc]
