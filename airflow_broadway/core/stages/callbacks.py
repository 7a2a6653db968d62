"""Calls user callbacks, for both stages: the context, error handling, ``handle_failed``.

A callback that raises fails its messages and nothing else.  The error is logged with a ``code`` (an
extra of the log record, see ``docs/semantics.md``) and becomes the messages' status.
``SystemExit`` counts as such an error (kind ``exit``), and so do ``GeneratorExit``, asyncio's
``CancelledError`` and panics of Rust extensions.  Every other ``BaseException``, such as
``KeyboardInterrupt`` and Airflow's task timeout, propagates.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
from asyncio.exceptions import CancelledError
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from airflow_broadway.core import telemetry
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.acks import Scope
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.failure_log import LOGGED_FAILURES, count_failure, name_messages
from airflow_broadway.core.text import pluralize

log = logging.getLogger(__name__)

#: A cancelled coroutine and a closed generator concern the callback only, though Python does not
#: derive their exceptions from Exception.
_PROTECTED: Final = (Exception, SystemExit, GeneratorExit, CancelledError)
#: The module of panics: each extension built with PyO3 has its own exception class.
_RUST: Final = "pyo3_runtime"

_setup_lock = threading.Lock()


def protected() -> tuple[type[BaseException], ...]:
    """Returns the exceptions that a callback may raise without ending the run; to be called in an
    ``except`` clause.
    """
    raised = sys.exc_info()[0]
    is_panic = raised is not None and raised.__module__ == _RUST
    return (*_PROTECTED, raised) if is_panic and raised else _PROTECTED


def context_of(pipeline: Pipeline) -> Any:
    """Returns the ``context`` of every callback: ``setup``'s result, computed once per process."""
    attributes = pipeline.__dict__
    if "_context" not in attributes:
        with _setup_lock:
            if "_context" not in attributes:
                attributes["_context"] = pipeline.setup(pipeline.run)
    return attributes["_context"]


def status_of(error: BaseException) -> Status:
    """Returns the status of a message whose callback raised ``error``."""
    if isinstance(error, SystemExit):
        return Status("exit", error.code)
    return Status("error", error)


def end_span(span: telemetry.Span | None, error: BaseException) -> None:
    """Ends a span, if any, with the exception that its work raised."""
    if span is not None:
        status = status_of(error)
        span.exception(status.kind, status.reason, status.stacktrace)


def code_of(error: BaseException) -> str:
    """Returns the ``code`` under which ``error`` is logged."""
    if isinstance(error, SystemExit):
        return "callback_exit"
    if isinstance(error, PipelineError) and error.code:
        return error.code
    return "callback_error"


def log_failure(
    callback: str, pipeline: Pipeline, error: BaseException, messages: Sequence[Message] | int
) -> None:
    """Logs that a callback failed messages: the first ten of a kind, then each power of ten.

    :param messages: The messages, or their number where they are unknown: in a Spark driver.
    """
    number = count_failure(pipeline, callback, error)
    if number > LOGGED_FAILURES:
        if number % 100 == 0 and str(number).strip("0") == "1":
            log.error(
                "%s.%s has failed %d times by %s",
                type(pipeline).__name__,
                callback,
                number,
                type(error).__name__,
                extra={"code": code_of(error)},
            )
        return
    ids = [] if isinstance(messages, int) else [message.message_id for message in messages]
    with log_ids(message_id=ids[0] if len(ids) == 1 else None):
        log.error(
            "%s.%s failed %s: %s%s",
            type(pipeline).__name__,
            callback,
            pluralize(messages, "message") if isinstance(messages, int) else name_messages(ids),
            _describe_error(error),
            "; further ones of this kind are counted, not logged one by one"
            if number == LOGGED_FAILURES
            else "",
            exc_info=None if isinstance(error, PipelineError) else error,
            extra={"code": code_of(error)},
        )


def _describe_error(error: BaseException) -> str:
    """Returns an exception's type and text; of our own errors the text alone."""
    if isinstance(error, PipelineError):
        return str(error)
    return status_of(error).text.removesuffix(": ")


def fail_all(messages: Iterable[Message], status: Status, scope: Scope) -> list[Message]:
    """Returns ``messages`` as they were before the callback that failed, with its ``status``."""
    return [scope.restored(message).replace(status=status) for message in messages]


def expect_messages(
    callback: str, returned: Any, *, code: str = "", element_code: str = ""
) -> list[Message]:
    """Returns ``returned``, if it is a list of messages.

    :param code: The error's code, if it is not a list.
    :param element_code: The error's code, if the list contains something else.
    :raises PipelineError: In both cases.
    """
    rule = f"{callback} must return a list of messages"
    if not isinstance(returned, list):
        raise PipelineError(f"{rule}, got: {returned!r:.200}", code=code)
    for item in returned:
        if type(item) is not Message:
            raise PipelineError(f"{rule}, but one element was: {item!r:.200}", code=element_code)
    return returned


class Returned(NamedTuple):
    """A callback's returned messages, matched with those passed to it.

    :param own: Passed messages, each once; as failed, if returned as both.
    :param detached: Passed messages that were returned without their acknowledger, as passed.
    :param mismatch: A description of other returned messages; empty if there are none.
    """

    own: list[Message]
    detached: list[Message]
    mismatch: str = ""

    @classmethod
    def of(cls, passed: list[Message], returned: list[Message], scope: Scope) -> Returned:
        """Matches messages by id; those without an id are all taken as passed."""
        if len(passed) == len(returned) and all(map(operator.is_, passed, returned)):
            return cls(returned, [])
        known = {message.message_id: message for message in passed}
        own: dict[Any, Message] = {}
        detached: dict[str, Message] = {}
        unknown: list[str] = []
        duplicates = 0
        for message in returned:
            message_id = message.message_id
            if message_id not in known:
                unknown.append(message_id)
            elif not message_id:
                own[id(message)] = message
            elif not is_of(message, known[message_id], scope):
                detached[message_id] = known[message_id]
            elif message_id in own:
                duplicates += 1
                if not message.ok:
                    own[message_id] = message
            else:
                own[message_id] = message
        mismatch = f", {duplicates} of them twice" if duplicates else ""
        if unknown:
            mismatch += f", {len(unknown)} of them unknown, such as {unknown[0]!r}"
        lost = [message for key, message in detached.items() if key not in own]
        return cls(list(own.values()), lost, mismatch)


def is_of(message: Message, passed: Message, scope: Scope) -> bool:
    """Returns whether a message is one that was passed to a callback, or derived from it."""
    return message.message_id == passed.message_id and (
        message.acknowledger.acknowledger is passed.acknowledger.acknowledger
        or scope.has_settled(passed)
    )


def run_handle_failed(
    pipeline: Pipeline, failed: list[Message], context: Any, scope: Scope
) -> list[Message]:
    """Calls ``handle_failed``, if the pipeline overrides it, with a stage's failures.

    Returns the messages to settle as failed: its result, or ``failed`` itself if it raised.
    """
    if not failed or not pipeline.defines("handle_failed"):
        return failed
    metadata = {"module": type(pipeline), "messages": failed, "context": context}
    span = None
    if telemetry.observed("handle_failed"):
        span = telemetry.Span("handle_failed", {**metadata})
    try:
        returned: Any = pipeline.handle_failed(list(failed), context)
    except protected() as error:
        log_failure("handle_failed", pipeline, error, failed)
        end_span(span, error)
        return [scope.restored(message) for message in failed]
    handled = _check_handled(pipeline, failed, returned, scope)
    if span is not None:
        span.stop({**metadata, "messages": handled})
    return handled


def _check_handled(
    pipeline: Pipeline, failed: list[Message], returned: Any, scope: Scope
) -> list[Message]:
    """Returns the messages to settle as failed, by ``handle_failed``'s result; logs mismatches."""
    name = type(pipeline).__name__
    if not isinstance(returned, list) or not all(type(item) is Message for item in returned):
        log.error(
            "%s.handle_failed must return a list of messages, got: %.200r; the failed messages are"
            " settled as they were",
            name,
            returned,
            extra={"code": "handle_failed_bad_return"},
        )
        return [scope.restored(message) for message in failed]
    result = Returned.of(failed, returned, scope)
    handled = [*result.own, *(scope.restored(message) for message in result.detached)]
    if result.detached:
        log.error(
            "%s.handle_failed returned %s without its acknowledger, the first of them %r:"
            " settled as before",
            name,
            pluralize(len(result.detached), "message"),
            result.detached[0].message_id,
            extra={"code": "handle_failed_bad_return"},
        )
    if len(handled) != len(failed) or result.mismatch:
        log_mismatch(
            "handle_failed",
            pipeline,
            len(failed),
            f"{len(returned)}{result.mismatch}",
            code="handle_failed_count_mismatch",
        )
    return handled


def log_mismatch(
    callback: str, pipeline: Pipeline, received: int, returned: str, *, code: str
) -> None:
    """Logs that a callback did not return the messages that it received.

    :param returned: The number of messages that it returned, and what is wrong with them.
    """
    log.error(
        "%s.%s received %s and returned %s; messages that it did not"
        " return are not settled, and are released when the run ends",
        type(pipeline).__name__,
        callback,
        pluralize(received, "message"),
        returned,
        extra={"code": code},
    )
