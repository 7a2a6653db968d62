"""The boundary of a pipeline's callbacks, and the record of their calls.

Each call is recorded in a separate file, before and after it: an account that is independent of the
package's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.sink import Rows
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.spark.results import Outcomes, is_frame, read
from airflow_broadway.testing.crashes.interceptor import Interceptor, replace

#: The error text of a callback into which a fault was injected.
INJECTED = "a fault was injected into the callback"


class RecordedCall(NamedTuple):
    """A recorded call of ``handle_message`` or ``handle_batch``.

    :param stage: The callback; ``ack_immediately`` for messages that it settles immediately.
    :param batch_id: The batch's id; empty for ``handle_message``.
    :param messages: (id, attempt, redelivered) of each message.
    :param succeeded: The ids of successful messages; ``None``: the call did not return.
    """

    execution: str
    stage: str
    batch_id: str
    messages: list[tuple[str, int, bool]]
    succeeded: frozenset[str] | None


class TaskTimeOut(BaseException):
    """The timeout of a task expires within a callback, like Airflow's own timeout."""


class Callbacks:
    """Intercepts and records ``handle_message`` and ``handle_batch`` of one pipeline.

    :param file: The file in which calls are recorded.
    :param id_of: Returns the id of a message.
    """

    def __init__(
        self, pipeline: type[Pipeline], file: Path, id_of: Callable[[Message], str]
    ) -> None:
        self._pipeline = pipeline
        self._file = file
        self._id_of = id_of

    def install(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        replace(self._pipeline, "handle_message", self._handling_message)
        if self._pipeline.defines("handle_batch"):
            replace(self._pipeline, "handle_batch", self._handling_batch)
        replace(RunAcknowledger, "ack_now", self._acking_now)

    def _handling_message(self, do: Any) -> Any:
        def handle_message(pipeline: Any, processor: str, message: Message, context: Any) -> Any:
            handle = partial(do, pipeline, processor, message, context)
            return self._call("handle_message", "", "", [message], handle)

        return handle_message

    def _handling_batch(self, do: Any) -> Any:
        def handle_batch(
            pipeline: Any, batcher: str, messages: Any, batch_info: Any, context: Any
        ) -> Any:
            handle = partial(do, pipeline, batcher, messages, batch_info, context)
            return self._call("handle_batch", batcher, batch_info.batch_id, messages, handle)

        return handle_batch

    def _acking_now(self, do: Any) -> Any:
        def ack_now(acknowledger: Any, ref: Any, successful: Any, failed: Any) -> Any:
            # At most once: the broker need not redeliver them from here on.
            self._record("ack_immediately", "", successful, None)
            return do(acknowledger, ref, successful, failed)

        return ack_now

    def _call(
        self, stage: str, target: str, batch_id: str, argument: Any, do: Callable[[], Any]
    ) -> Any:
        """Calls a callback, and records the call before and after it."""

        def recorded() -> Any:
            frame = is_frame(argument)
            messages: Sequence[Message] = _messages_of(argument) if frame else argument
            self._record(stage, batch_id, messages, None)
            result = do()
            if stage == "handle_batch" and self._pipeline.batchers[target].sink is not None:
                failed = result.failed if isinstance(result, Rows) else ()
                succeeded = (
                    _successful_rows(messages, failed or None)
                    if frame
                    else _messages_without(messages, failed)
                )
            else:
                succeeded = (
                    _successful_rows(messages, result) if frame else _successful_messages(result)
                )
            self._record(stage, batch_id, messages, [self._id_of(m) for m in succeeded])
            return result

        return self._interceptor.call(
            stage, target, recorded, nested=True, error=_failed, timeout=TaskTimeOut
        )

    def _record(
        self, stage: str, batch_id: str, messages: Sequence[Message], succeeded: list[str] | None
    ) -> None:
        record = {
            "execution": self._interceptor.execution,
            "stage": stage,
            "batch_id": batch_id,
            "messages": [(self._id_of(m), m.attempt, m.redelivered) for m in messages],
            "succeeded": succeeded,
        }
        # A single appending write is atomic, even if the process dies.
        os.write(self._handle, json.dumps(record).encode() + b"\n")


def _successful_messages(result: Any) -> list[Message]:
    """Returns the successful messages of a Python callback's result."""
    messages = result if isinstance(result, list) else [result]
    return [m for m in messages if isinstance(m, Message) and m.status.kind == "ok"]


def _messages_without(messages: Sequence[Message], failed: Sequence[Message]) -> list[Message]:
    """Returns the messages of a batch that did not fail."""
    ids = {message.message_id for message in failed}
    return [message for message in messages if message.message_id not in ids]


def _messages_of(frame: Any) -> list[Message]:
    """Returns the messages of a DataFrame, in order of position."""
    rows = frame.select("position", "message_id", "attempt", "redelivered", "metadata").collect()
    return [
        Message(None, message_id=key, attempt=attempt, redelivered=redelivered, metadata=metadata)
        for _, key, attempt, redelivered, metadata in sorted(rows, key=lambda row: row[:2])
    ]


def _successful_rows(messages: Sequence[Message], returned: Any) -> list[Message]:
    """Returns the messages that succeeded, by the result of ``handle_batch`` on Spark."""
    results = read(returned)
    if isinstance(results, Outcomes):
        condition = "ok" if results.status == "ok" else "lower(string(status)) IN ('ok', 'true')"
        ids = _ids(results.frame.where(condition))
        return [m for m in messages if m.message_id in ids]
    failed_ids = {key for part in results.parts for key in _ids(part.rows)} if results else set()
    return [m for m in messages if m.message_id not in failed_ids]


def _ids(rows: Any) -> set[str]:
    """Returns the message ids of a DataFrame, or the given ids."""
    if not is_frame(rows):
        return set(rows)
    return {row["message_id"] for row in rows.select("message_id").collect()}


def recorded_calls(file: Path) -> Iterator[RecordedCall]:
    """Yields the calls in order; a call that returned is yielded twice: at start and end."""
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        record = json.loads(line)
        succeeded = record["succeeded"]
        yield RecordedCall(
            record["execution"],
            record["stage"],
            record["batch_id"],
            [tuple(message) for message in record["messages"]],
            None if succeeded is None else frozenset(succeeded),
        )


def _failed() -> Exception:
    return RuntimeError(INJECTED)
