"""The boundary of a pipeline's callbacks, and what they witness.

What they get is written down from outside, before and after each call, in a file of its own: our
own account is never asked whether it is right.
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

#: What a callback raises that was made to fail.
STRUCK = "the callback was struck"


class Witnessed(NamedTuple):
    """One call of ``handle_message`` or ``handle_batch`` with some messages.

    :param stage: The callback; ``ack_immediately``: they are successes that it settles at once.
    :param batch_id: The batch's; empty for ``handle_message``.
    :param messages: (id, attempt, redelivered) of each.
    :param succeeded: The ids of those that succeeded; ``None``: the call did not return.
    """

    execution: str
    stage: str
    batch_id: str
    messages: list[tuple[str, int, bool]]
    succeeded: frozenset[str] | None


class TaskTimeOut(BaseException):
    """The time-out of a task is over while a callback is at work, as Airflow's would be."""


class Callbacks:
    """``handle_message`` and ``handle_batch`` of one pipeline.

    :param file: Where their calls are written down.
    :param id_of: Says under which id a message is.
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
        witness = self

        def message_handled(self: Any, processor: str, message: Message, context: Any) -> Any:
            return interceptor.call(
                "handle_message",
                "",
                lambda: witness._witness(
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
                lambda: witness._witness(
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
        replace(RunAcknowledger, "ack_now", self._settled_at_once)

    def _settled_at_once(self, do: Any) -> Any:
        def ack_now(acknowledger: Any, ref: Any, successful: Any, failed: Any) -> None:
            # At most once: from here on the broker need not give them again.
            self._tell("ack_immediately", "", successful, None)
            do(acknowledger, ref, successful, failed)

        return ack_now

    def _witness(self, stage: str, batch_id: str, given: Any, do: Callable[[], Any]) -> Any:
        messages: Sequence[Message] = messages_of(given) if is_frame(given) else given
        self._tell(stage, batch_id, messages, None)
        came = do()
        fine = fine_of(messages, came) if is_frame(given) else _fine(came)
        self._tell(stage, batch_id, messages, [self._id_of(m) for m in fine])
        return came

    def _tell(
        self, stage: str, batch_id: str, messages: Sequence[Message], succeeded: list[str] | None
    ) -> None:
        told = {
            "execution": self._execution,
            "stage": stage,
            "batch_id": batch_id,
            "messages": [(self._id_of(m), m.attempt, m.redelivered) for m in messages],
            "succeeded": succeeded,
        }
        # One write, to the end: whole or absent, whoever dies.
        os.write(self._handle, json.dumps(told).encode() + b"\n")


def _fine(came: Any) -> list[Message]:
    """The messages that succeeded, of what a callback of Python returned."""
    returned = came if isinstance(came, list) else [came]
    return [m for m in returned if isinstance(m, Message) and m.status.kind == "ok"]


def witnessed(file: Path) -> Iterator[Witnessed]:
    """The calls in order; one that returned is there twice: begun, and ended."""
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        told = json.loads(line)
        fine = told["succeeded"]
        yield Witnessed(
            told["execution"],
            told["stage"],
            told["batch_id"],
            [tuple(each) for each in told["messages"]],
            None if fine is None else frozenset(fine),
        )


def _failed() -> Exception:
    return RuntimeError(STRUCK)
