"""What both stages need to call a user's callbacks: the context, protection, ``handle_failed``.

A callback that raises fails its messages and nothing else.  The error is logged with a ``code`` (an
extra of the log record, see :data:`CODES`) and becomes the messages' status.  ``SystemExit`` counts
as such an error (kind ``exit``), and so do ``GeneratorExit``, asyncio's ``CancelledError`` and the
panic of an extension in Rust.  Every other ``BaseException``, such as ``KeyboardInterrupt`` and
Airflow's task time-out, goes through untouched.
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
from airflow_broadway.core.text import many

log = logging.getLogger(__name__)

#: A cancelled coroutine and a generator that was closed are the callback's own affair, though
#: Python does not derive them from Exception.
_PROTECTED: Final = (Exception, SystemExit, GeneratorExit, CancelledError)
#: The module of the class of a panic: each extension that is made with PyO3 has its own class.
_RUST: Final = "pyo3_runtime"

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

_HANDLE_FAILED: Final = ("handle_failed.start", "handle_failed.stop", "handle_failed.exception")

_setup_lock = threading.Lock()


def protected() -> tuple[type[BaseException], ...]:
    """Return what a callback may raise without ending the run; for an ``except``, which calls this
    when something was raised.
    """
    raised = sys.exc_info()[0]
    is_panic = raised is not None and raised.__module__ == _RUST
    return (*_PROTECTED, raised) if is_panic and raised else _PROTECTED


def context_of(pipeline: Pipeline) -> Any:
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
    return Status("error", error)


def end_span(span: telemetry.Span | None, error: BaseException) -> None:
    """End a span, if there is one, by the exception that its work raised."""
    if span is not None:
        status = status_of(error)
        span.exception(status.kind, status.reason, status.stacktrace)


def code_of(error: BaseException) -> str:
    """The ``code`` under which ``error`` is logged."""
    if isinstance(error, SystemExit):
        return "callback_exit"
    if isinstance(error, PipelineError) and error.code:
        return error.code
    return "callback_error"


def log_failure(
    callback: str, pipeline: Pipeline, error: BaseException, messages: Sequence[Message] | int
) -> None:
    """Log that a callback failed ``messages`` messages: the first ten of a kind, then each tenfold.

    :param messages: They, or how many where nobody knows them: in a Spark driver.
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
    known = [] if isinstance(messages, int) else [each.message_id for each in messages]
    with log_ids(message_id=known[0] if len(known) == 1 else None):
        log.error(
            "%s.%s failed %s: %s%s",
            type(pipeline).__name__,
            callback,
            many(messages, "message") if isinstance(messages, int) else name_messages(known),
            _described(error),
            "; further ones of this kind are counted, not logged one by one"
            if number == LOGGED_FAILURES
            else "",
            exc_info=None if isinstance(error, PipelineError) else error,
            extra={"code": code_of(error)},
        )


def _described(error: BaseException) -> str:
    """Return an exception's type and text; a sentence of our own stands for itself."""
    if isinstance(error, PipelineError):
        return str(error)
    return status_of(error).text.removesuffix(": ")


def fail_all(messages: Iterable[Message], status: Status, scope: Scope) -> list[Message]:
    """``messages`` as they were before the callback that failed, with its ``status``."""
    return [scope.restored(message).with_status(status) for message in messages]


def expect_messages(
    callback: str, returned: Any, *, code: str = "", element_code: str = ""
) -> list[Message]:
    """``returned``, if it is a list of messages.

    :param code: The error's code, if it is no list.
    :param element_code: The error's code, if the list holds something else.
    :raises PipelineError: In both cases.
    """
    what = f"{callback} must return a list of messages"
    if not isinstance(returned, list):
        raise PipelineError(f"{what}, got: {returned!r:.200}", code=code)
    for each in returned:
        if type(each) is not Message:
            raise PipelineError(f"{what}, but one element was: {each!r:.200}", code=element_code)
    return returned


class Returned(NamedTuple):
    """What a callback returned of the messages that it was given.

    :param own: Those of them, each once; as failed, if it was returned as both.
    :param anew: Those that it returned without what settles them, as they were given.
    :param odd: What else was among them, for people; empty if nothing was.
    """

    own: list[Message]
    anew: list[Message]
    odd: str = ""

    @classmethod
    def of(cls, given: list[Message], returned: list[Message], scope: Scope) -> Returned:
        """Sort out what was returned; where messages have no id, one without is its own."""
        if len(given) == len(returned) and all(map(operator.is_, given, returned)):
            return cls(returned, [])
        known = {message.message_id: message for message in given}
        own: dict[Any, Message] = {}
        anew: dict[str, Message] = {}
        strangers: list[str] = []
        doubled = 0
        for message in returned:
            name = message.message_id
            if name not in known:
                strangers.append(name)
            elif not name:
                own[id(message)] = message
            elif not is_of(message, known[name], scope):
                anew[name] = known[name]
            elif name in own:
                doubled += 1
                if not message.ok:
                    own[name] = message
            else:
                own[name] = message
        odd = f", {doubled} of them again" if doubled else ""
        if strangers:
            odd += f", {len(strangers)} of them others than it was given, such as {strangers[0]!r}"
        return cls(
            list(own.values()), [each for name, each in anew.items() if name not in own], odd
        )


def is_of(message: Message, given: Message, scope: Scope) -> bool:
    """Whether a message is the one that a callback was given, or made of it."""
    return message.message_id == given.message_id and (
        message.acknowledger.acknowledger is given.acknowledger.acknowledger
        or scope.has_settled(given)
    )


def run_handle_failed(
    pipeline: Pipeline, failed: list[Message], context: Any, scope: Scope
) -> list[Message]:
    """Call ``handle_failed``, if the pipeline has one, with a stage's failures.

    Returns those to settle as failed: what it returned, or ``failed`` itself if it broke.
    """
    if not failed or not pipeline.defines("handle_failed"):
        return failed
    about = {"module": type(pipeline), "messages": failed, "context": context}
    span = None
    if telemetry.handlers(*_HANDLE_FAILED):
        span = telemetry.Span("handle_failed", {**about})
    try:
        returned: Any = pipeline.handle_failed(list(failed), context)
    except protected() as error:
        log_failure("handle_failed", pipeline, error, failed)
        end_span(span, error)
        return [scope.restored(message) for message in failed]
    handled = _handled(pipeline, failed, returned, scope)
    if span is not None:
        span.stop({**about, "messages": handled})
    return handled


def _handled(
    pipeline: Pipeline, failed: list[Message], returned: Any, scope: Scope
) -> list[Message]:
    """What to settle as failed, by what ``handle_failed`` returned; odd things are logged."""
    name = type(pipeline).__name__
    if not isinstance(returned, list) or not all(type(each) is Message for each in returned):
        log.error(
            "%s.handle_failed must return a list of messages, got: %.200r; the failed messages are"
            " settled as they were",
            name,
            returned,
            extra={"code": "handle_failed_bad_return"},
        )
        return [scope.restored(message) for message in failed]
    found = Returned.of(failed, returned, scope)
    handled = [*found.own, *(scope.restored(message) for message in found.anew)]
    if found.anew:
        log.error(
            "%s.handle_failed returned %s without what settles it, the first of them %r:"
            " settled as before",
            name,
            many(len(found.anew), "message"),
            found.anew[0].message_id,
            extra={"code": "handle_failed_bad_return"},
        )
    if len(handled) != len(failed) or found.odd:
        log.error(
            "%s.handle_failed received %s and returned %d%s; one that it did not"
            " return is not settled, and goes back to its broker when the run ends",
            name,
            many(len(failed), "message"),
            len(returned),
            found.odd,
            extra={"code": "handle_failed_count_mismatch"},
        )
    return handled
