"""The boundary of a pipeline's callbacks, and the record of their calls.

Each call is recorded in a separate file, before and after it: an account that is independent of the
package's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from airflow_broadway.core.custody.acknowledger import RunAcknowledger
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.testing.crashes.frames import fine_of, is_frame, messages_of
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
        self._execution = interceptor.execution
        self._handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        handle_message = self._pipeline.handle_message
        handle_batch = self._pipeline.handle_batch
        callbacks = self

        def message_handled(self: Any, processor: str, message: Message, context: Any) -> Any:
            return interceptor.call(
                "handle_message",
                "",
                lambda: callbacks._recorded(
                    "handle_message",
                    "",
                    [message],
                    lambda: handle_message(self, processor, message, context),
                ),
                nested=True,
                error=_failed,
                hangs=TaskTimeOut,
            )

        def batch_handled(
            self: Any, batcher: str, messages: Any, batch_info: Any, context: Any
        ) -> Any:
            return interceptor.call(
                "handle_batch",
                batcher,
                lambda: callbacks._recorded(
                    "handle_batch",
                    batch_info.batch_id,
                    messages,
                    lambda: handle_batch(self, batcher, messages, batch_info, context),
                ),
                nested=True,
                error=_failed,
                hangs=TaskTimeOut,
            )

        self._pipeline.handle_message = message_handled  # type: ignore[method-assign]
        if self._pipeline.defines("handle_batch"):
            self._pipeline.handle_batch = batch_handled  # type: ignore[method-assign]
        replace(RunAcknowledger, "ack_now", self._ack_now_recorded)

    def _ack_now_recorded(self, do: Any) -> Any:
        def ack_now(acknowledger: Any, ref: Any, successful: Any, failed: Any) -> None:
            # At most once: the broker need not redeliver them from here on.
            self._record("ack_immediately", "", successful, None)
            do(acknowledger, ref, successful, failed)

        return ack_now

    def _recorded(self, stage: str, batch_id: str, argument: Any, do: Callable[[], Any]) -> Any:
        messages: Sequence[Message] = messages_of(argument) if is_frame(argument) else argument
        self._record(stage, batch_id, messages, None)
        result = do()
        fine = fine_of(messages, result) if is_frame(argument) else _fine(result)
        self._record(stage, batch_id, messages, [self._id_of(m) for m in fine])
        return result

    def _record(
        self, stage: str, batch_id: str, messages: Sequence[Message], succeeded: list[str] | None
    ) -> None:
        record = {
            "execution": self._execution,
            "stage": stage,
            "batch_id": batch_id,
            "messages": [(self._id_of(m), m.attempt, m.redelivered) for m in messages],
            "succeeded": succeeded,
        }
        # A single appending write is atomic, even if the process dies.
        os.write(self._handle, json.dumps(record).encode() + b"\n")


def _fine(result: Any) -> list[Message]:
    """Returns the successful messages of a Python callback's result."""
    messages = result if isinstance(result, list) else [result]
    return [m for m in messages if isinstance(m, Message) and m.status.kind == "ok"]


def recorded_calls(file: Path) -> Iterator[RecordedCall]:
    """Yields the calls in order; a call that returned comes twice: begun, and ended."""
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        record = json.loads(line)
        fine = record["succeeded"]
        yield RecordedCall(
            record["execution"],
            record["stage"],
            record["batch_id"],
            [tuple(message) for message in record["messages"]],
            None if fine is None else frozenset(fine),
        )


def _failed() -> Exception:
    return RuntimeError(INJECTED)
