"""What both stages need to call a user's callbacks: the context, protection, ``handle_failed``.

A callback that raises fails its messages and nothing else: the error is logged with a ``code`` (an
extra of the log record, see :data:`CODES`) and becomes the messages' status.  ``SystemExit`` is
such an error too (kind ``exit``); every other ``BaseException`` (``KeyboardInterrupt``, Airflow's
task time-out) goes through untouched.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from airflow_broadway.core import telemetry
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.message import Message, Status

if TYPE_CHECKING:
    from airflow_broadway.core.acknowledger import Scope
    from airflow_broadway.core.broadway import Broadway

__all__ = ["CODES", "PROTECTED", "context_of", "fail_all", "run_handle_failed", "status_of"]

log = logging.getLogger(__name__)

#: What a callback may raise without ending the run.
PROTECTED: Final = (Exception, SystemExit)

#: The ``code`` of each error that the stages log.
CODES: Final = (
    "acknowledger_error",
    "callback_error",
    "callback_exit",
    "configure_not_supported",
    "handle_batch_bad_element",
    "handle_batch_bad_return",
    "handle_batch_count_mismatch",
    "handle_batch_undefined",
    "handle_failed_bad_return",
    "handle_failed_count_mismatch",
    "handle_message_bad_return",
    "prepare_messages_count_mismatch",
    "producer_crash",
    "unknown_batcher",
)

_setup_lock = threading.Lock()


def context_of(pipeline: Broadway) -> Any:
    """The ``context`` of every callback: what ``setup`` returned, once per process."""
    known = pipeline.__dict__
    if "_context" not in known:
        with _setup_lock:
            if "_context" not in known:
                known["_context"] = pipeline.setup(pipeline.run)
    return known["_context"]


def status_of(error: BaseException) -> Status:
    """The status of a message whose callback raised ``error``."""
    if isinstance(error, SystemExit):
        return Status("exit", error.code)
    return Status("error", error, "".join(traceback.format_exception(error)))


def code_of(error: BaseException) -> str:
    """The ``code`` under which ``error`` is logged."""
    if isinstance(error, SystemExit):
        return "callback_exit"
    code = error.code if isinstance(error, PipelineError) else ""
    return code or "callback_error"


def log_failure(callback: str, pipeline: Broadway, error: BaseException, messages: int) -> None:
    """Log that a callback failed ``messages`` messages."""
    log.error(
        "%s.%s failed %d message%s: %s",
        type(pipeline).__name__,
        callback,
        messages,
        "" if messages == 1 else "s",
        f"SystemExit: {error.code}" if isinstance(error, SystemExit) else error,
        exc_info=None if isinstance(error, PipelineError) else error,
        extra={"code": code_of(error)},
    )


def fail_all(messages: Iterable[Message], status: Status, scope: Scope) -> list[Message]:
    """``messages`` as they were before the callback that failed, with its ``status``."""
    return [scope.restored(message).with_status(status) for message in messages]


def run_handle_failed(
    pipeline: Broadway, failed: list[Message], context: Any, scope: Scope
) -> list[Message]:
    """Call ``handle_failed``, if the pipeline has one, with a stage's failures.

    Returns those to settle as failed: what it returned, or ``failed`` itself if it broke.
    """
    if not failed or not pipeline.defines("handle_failed"):
        return failed
    span = None
    if telemetry.handlers(*_HANDLE_FAILED):
        about = {"module": type(pipeline), "messages": failed, "context": context}
        span = telemetry.Span("handle_failed", about)
    try:
        returned: Any = pipeline.handle_failed(list(failed), context)
    except PROTECTED as error:
        status = status_of(error)
        log_failure("handle_failed", pipeline, error, len(failed))
        if span is not None:
            span.exception(status.kind, status.reason, status.stacktrace)
        return [scope.restored(message) for message in failed]
    handled: list[Message] = returned
    if not isinstance(returned, list) or not all(type(each) is Message for each in returned):
        log.error(
            "%s.handle_failed must return a list of messages, got: %.200r; the failed messages are"
            " settled as they were",
            type(pipeline).__name__,
            returned,
            extra={"code": "handle_failed_bad_return"},
        )
        handled = [scope.restored(message) for message in failed]
    elif len(handled) != len(failed):
        log.error(
            "%s.handle_failed received %d messages and returned %d; one that it did not return is"
            " not settled, and goes back to its broker when the run ends",
            type(pipeline).__name__,
            len(failed),
            len(handled),
            extra={"code": "handle_failed_count_mismatch"},
        )
    if span is not None:
        span.stop({"module": type(pipeline), "messages": handled, "context": context})
    return handled


_HANDLE_FAILED: Final = ("handle_failed.start", "handle_failed.stop", "handle_failed.exception")
