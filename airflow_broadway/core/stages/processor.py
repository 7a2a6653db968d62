"""The processor: ``prepare_messages`` once per chunk, ``handle_message`` on each, then the acks.

The order for one chunk is Broadway's: prepare, handle each in order, ``handle_failed`` once, settle
the failures (and without batchers the successes, in the same call); only then do successes go on to
the batchers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from airflow_broadway.core import telemetry
from airflow_broadway.core.clock import SystemClock
from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.verdicts import COMES_AGAIN
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.log_context import log_ids, speak_of
from airflow_broadway.core.model.acks import Scope, ack_messages
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.callbacks import (
    Returned,
    context_of,
    end_span,
    expect_messages,
    fail_all,
    is_of,
    log_failure,
    protected,
    run_handle_failed,
    status_of,
)
from airflow_broadway.core.stages.entry import EntryFailure, is_entry_failure
from airflow_broadway.core.stages.failure_log import forget_trace
from airflow_broadway.core.stages.stop import Stop
from airflow_broadway.core.text import many

log = logging.getLogger(__name__)

_CHUNK: Final = ("processor.start", "processor.stop", "processor.exception")
_MESSAGE: Final = (
    "processor.message.start",
    "processor.message.stop",
    "processor.message.exception",
)

#: Settles a stage's result: ``ack(successful, failed)``.
Ack = Callable[[list[Message], list[Message]], None]
#: Makes, of a pipeline, what turns each successful message into what goes on to the batchers.
Convert = Callable[[Pipeline], Callable[[Message], Message]]


class ChunkResult(NamedTuple):
    """What became of one chunk.

    :param successful: Those to batch; without batchers, those settled as successful.
    :param failed: Those settled as failed, as ``handle_failed`` returned them.
    """

    successful: list[Message]
    failed: list[Message]


class HeldGroups:
    """The groups of which a message failed and is delivered again: what is behind it waits.

    One object serves all processors of a run; nothing is held unless the producer keeps order.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._groups: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def has(self, message: Message) -> bool:
        """Return whether the message is behind one that failed and is delivered again."""
        return self._producer.group_of(message) in self._groups

    def add(self, failed: Iterable[Message]) -> None:
        """Hold the groups of those that failed and are delivered again."""
        producer = self._producer
        if not producer.keeps_order:
            return
        for message in failed:
            group = producer.group_of(message)
            if group is not None and group not in self._groups:
                verdict = producer.verdict(message, failed=True, stage="process")
                if verdict.action in COMES_AGAIN:
                    self._groups.add(group)


class ProcessorStage:
    """One processor of a pipeline; handles one chunk at a time.

    :param index: Which of ``concurrency`` processors this is, from 0.
    :param ack: Settles a chunk's result: ``ack(successful, failed)``.
    :param convert: Called once with the pipeline.  What it returns is called with each success, and
        returns what goes on; what it raises fails the message.
    :param stop: When no further message is begun; those not begun are in neither list of a result.
    :param traces: Whether every failure keeps its traceback.  Without, only those do that are
        logged: frames are dear.  ``handle_failed`` and telemetry get them always.
    :param held: Shared with the other processors of the run.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        index: int = 0,
        ack: Ack = ack_messages,
        convert: Convert | None = None,
        stop: Stop | None = None,
        traces: bool = True,
        held: HeldGroups | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.index = index
        self._ack = ack
        self._convert = None if convert is None else convert(pipeline)
        self._run_stop = stop or Stop(SystemClock())
        self._interrupts = self._run_stop.interrupts
        self._traces = traces or pipeline.defines("handle_failed")
        self._key: str = pipeline.processors.name
        self._known = frozenset(pipeline.batchers)
        self._prepares = pipeline.defines("prepare_messages")
        self._keeps_order = pipeline.producer.keeps_order
        self._held = held or HeldGroups(pipeline.producer)
        self.name = f"{pipeline.name}.Broadway.Processor_{self._key}_{index}"

    def handle(self, chunk: list[Message]) -> ChunkResult:
        """Run the callbacks on one chunk and settle what is to be settled.

        An exception of a callback never gets out; ``KeyboardInterrupt`` and its like do, and then
        nothing of the chunk has been settled but what the callbacks settled themselves.
        """
        context = context_of(self.pipeline)
        span = None
        heard = telemetry.heard()
        if heard and telemetry.handlers(*_CHUNK):
            span = telemetry.Span("processor", {**self._about(context), "messages": chunk})
        # What goes on may be converted; handlers get messages as the callbacks know them.
        unconverted: list[Message] | None = None if span is None or self._convert is None else []
        try:
            with Scope("process") as scope:
                result = self._handle(chunk, context, scope, unconverted, heard)
        except BaseException as error:
            end_span(span, error)
            raise
        if span is not None:
            successful = result.successful if unconverted is None else unconverted
            self._stop(span, successful, result.failed, context)
        return result

    def _about(self, context: Any) -> dict[str, Any]:
        return {
            "topology_name": self.pipeline.name,
            "name": self.name,
            "index": self.index,
            "processor_key": self._key,
            "context": context,
            "producer": self.pipeline.producer,
        }

    def _stop(
        self,
        span: telemetry.Span,
        successful: list[Message],
        failed: list[Message],
        context: Any,
    ) -> None:
        to_forward, to_ack = (successful, []) if self._known else ([], successful)
        span.stop(
            {
                **self._about(context),
                "successful_messages_to_ack": to_ack,
                "successful_messages_to_forward": to_forward,
                "failed_messages": failed,
            }
        )

    def _handle(
        self,
        chunk: list[Message],
        context: Any,
        scope: Scope,
        unconverted: list[Message] | None,
        heard: bool,
    ) -> ChunkResult:
        """Handle a chunk.

        :param unconverted: Filled with the successes as ``handle_message`` left them, unconverted.
        :param heard: Whether any event has a handler.
        """
        successful: list[Message] = []
        failed: list[Message] = []
        entered = [message for message in chunk if type(message.status) is not EntryFailure]
        prepared = entered
        if self._prepares and entered:
            prepared = self._prepare(entered, context, failed, scope)
        if len(entered) != len(chunk):
            prepared = self._with_entry_failures(chunk, prepared, failed)
        admitted = self._in_order(prepared, failed) if self._keeps_order else prepared
        with log_ids(message_id=None):
            self._handle_each(
                admitted,
                context,
                successful,
                failed,
                scope,
                unconverted=unconverted,
                heard=heard,
            )
        if failed:
            failed = run_handle_failed(self.pipeline, failed, context, scope)
        if not self._known:
            self._ack(successful, failed)
        elif failed:
            self._ack([], failed)
        return ChunkResult(successful, failed)

    def _prepare(
        self, chunk: list[Message], context: Any, failed: list[Message], scope: Scope
    ) -> list[Message]:
        try:
            returned = self.pipeline.prepare_messages(list(chunk), context)
            prepared = expect_messages("prepare_messages", returned)
            if len(prepared) != len(chunk):
                raise PipelineError(
                    "expected all messages to be returned from prepare_messages: it was given"
                    f" {len(chunk)} and returned {len(prepared)}",
                    code="prepare_messages_count_mismatch",
                )
            found = Returned.of(chunk, prepared, scope)
            if len(found.own) != len(chunk):
                raise PipelineError(
                    f"expected the messages of the chunk from prepare_messages, each once: of"
                    f" {len(chunk)} it returned {len(found.own)}{found.odd}"
                    + (f", {len(found.anew)} without what settles them" if found.anew else ""),
                    code="prepare_messages_count_mismatch",
                )
        except protected() as error:
            log_failure("prepare_messages", self.pipeline, error, chunk)
            failed.extend(fail_all(chunk, status_of(error), scope))
            return []
        return prepared

    def _with_entry_failures(
        self, chunk: list[Message], prepared: list[Message], failed: list[Message]
    ) -> list[Message]:
        """Fail what ``transformer`` or ``partition_by`` failed; where order counts, in its place.

        :param prepared: The other messages of the chunk; none, if that failed them.
        """
        if not self._keeps_order:
            failed.extend(_plainly_failed(each) for each in chunk if is_entry_failure(each))
            return prepared
        others = iter(prepared)
        merged = [each if is_entry_failure(each) else next(others, None) for each in chunk]
        return [each for each in merged if each is not None]

    def _in_order(self, messages: list[Message], failed: list[Message]) -> Iterator[Message]:
        """All but those behind one of their group that failed and comes again.

        They are in neither list, and so given back without using up an attempt.

        :param failed: Where each message is by the time that the next is asked for, if it failed.
        """
        groups, held = self._held, 0
        groups.add(failed)  # the whole chunk, where prepare_messages has failed it
        known = len(failed)
        for message in messages:
            if groups and groups.has(message):
                held += 1
                continue
            if is_entry_failure(message):
                failed.append(_plainly_failed(message))
            else:
                yield message
            if len(failed) > known:
                groups.add(failed[known:])
                known = len(failed)
        if held:
            with log_ids(message_id=None):  # not of the one that was handled last
                log.info(
                    "%s held back: an earlier one of the group failed and comes again.",
                    many(held, "message"),
                )

    def _handle_each(
        self,
        messages: Iterable[Message],
        context: Any,
        successful: list[Message],
        failed: list[Message],
        scope: Scope,
        *,
        unconverted: list[Message] | None,
        heard: bool,
    ) -> None:
        # The loop that every message goes through: what _check asks is asked here first.
        handle, key, known = self.pipeline.handle_message, self._key, self._known
        convert, stop, now = self._convert, self._run_stop, self._run_stop.now
        succeed, span = successful.append, None
        about = self._about(context) if heard and telemetry.handlers(*_MESSAGE) else None
        for message in messages:
            if now() >= stop.look_at and stop.enough():
                return
            speak_of(message.message_id)
            if about is not None:
                span = telemetry.Span("processor.message", {**about, "message": message})
            try:
                result = handled = handle(key, message, context)
                if not (
                    type(result) is Message
                    and result.status.kind == "ok"
                    and (not known or result.batcher in known)
                    and result.message_id == message.message_id
                    and result.acknowledger is message.acknowledger
                ):
                    self._check(result, message, scope)
                if convert is not None and result.status.kind == "ok":
                    result = convert(result)
            except protected() as error:
                log_failure("handle_message", self.pipeline, error, [message])
                if not self._traces and span is None:
                    forget_trace(error)
                failed.append(scope.restored(message).with_status(status_of(error)))
                end_span(span, error)
                continue
            except BaseException as error:
                end_span(span, error)
                if not isinstance(error, self._interrupts):
                    raise
                self._interrupted(message, error)
                continue
            if handled.status.kind == "ok":
                succeed(result)
                if unconverted is not None:
                    unconverted.append(handled)
            else:
                failed.append(result)
            if span is not None and about is not None:
                span.stop({**about, "message": handled})

    def _interrupted(self, message: Message, error: BaseException) -> None:
        """Let what is done stand, and the message at work go back."""
        log.error(
            "%s ended handle_message while it was at message %r, which goes back without using up"
            " an attempt; what was done before it stands",
            type(error).__name__,
            message.message_id,
        )
        self._run_stop.request("interrupted", at_once=True)

    def _check(self, result: Any, message: Message, scope: Scope) -> None:
        """Raise unless ``result`` is ``message``, and may go on; one that failed always may."""
        if type(result) is not Message:
            raise PipelineError(
                f"expected a Message from handle_message, got: {result!r:.200}",
                code="handle_message_bad_return",
            )
        if not is_of(result, message, scope):
            raise PipelineError(
                f"expected from handle_message the message that it was given"
                f" ({message.message_id!r}), changed by its put_… functions; got another:"
                f" {result!r:.200}",
                code="handle_message_bad_return",
            )
        if result.ok and self._known and result.batcher not in self._known:
            raise PipelineError(
                f"message was set to unknown batcher {result.batcher!r}. The known batchers are"
                f" {list(self.pipeline.batchers)}",
                code="unknown_batcher",
            )


def _plainly_failed(message: Message) -> Message:
    return message.with_status(Status(*message.status))
