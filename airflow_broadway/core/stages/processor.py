"""The processor: ``prepare_messages`` per chunk, ``handle_message`` per message, then the acks.

The order for one chunk is Broadway's: prepare, handle each in order, ``handle_failed`` once, settle
the failures (and without batchers the successes, in the same call); only then are successes passed
to the batchers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

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
from airflow_broadway.core.text import pluralize

log = logging.getLogger(__name__)

#: Settles a stage's result: ``ack(successful, failed)``.
Ack = Callable[[list[Message], list[Message]], None]
#: Returns, for a pipeline, the function that converts each successful message for its batcher.
Convert = Callable[[Pipeline], Callable[[Message], Message]]


class ChunkResult(NamedTuple):
    """The result of one chunk.

    :param successful: Messages to batch; without batchers, those settled as successful.
    :param failed: Messages settled as failed, as ``handle_failed`` returned them.
    """

    successful: list[Message]
    failed: list[Message]


class HeldGroups:
    """The groups with a failed message that is redelivered: messages behind it are released.

    All processors of a run share one object; nothing is held unless the producer keeps order.
    """

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._groups: set[str] = set()

    def has(self, message: Message) -> bool:
        """Returns whether the message is behind one that failed and is redelivered."""
        return bool(self._groups) and self._producer.group_of(message) in self._groups

    def add(self, failed: Iterable[Message]) -> None:
        """Holds the groups of failed messages that are redelivered."""
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

    :param index: The index of this processor among ``concurrency``, from 0.
    :param ack: Settles a chunk's result: ``ack(successful, failed)``.
    :param convert: Called once with the pipeline; the returned function converts each success.  Its
        exceptions fail the message.
    :param stop: Stops the processor: no further message is begun; those are in neither list of a
        result.
    :param traces: Whether every failure keeps its traceback.  If not, only logged ones do: frames
        are expensive.  ``handle_failed`` and telemetry always get them.
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
        """Runs the callbacks on one chunk and settles the results.

        Exceptions of callbacks never propagate; ``KeyboardInterrupt`` and similar ones do, and then
        only messages that the callbacks settled themselves are settled.
        """
        pipeline = self.pipeline
        context = context_of(pipeline)
        chunk_observed = telemetry.observed("processor")
        messages_observed = telemetry.observed("processor.message")
        metadata, span = None, None
        if chunk_observed or messages_observed:
            metadata = {
                "topology_name": pipeline.name,
                "name": self.name,
                "index": self.index,
                "processor_key": self._key,
                "context": context,
                "producer": pipeline.producer,
            }
            if chunk_observed:
                span = telemetry.Span("processor", {**metadata, "messages": chunk})
        # Successes may be converted; handlers get messages as the callbacks returned them.
        unconverted: list[Message] | None = None if span is None or self._convert is None else []
        try:
            with Scope("process") as scope:
                of_message = metadata if messages_observed else None
                result = self._handle(chunk, context, scope, unconverted, of_message)
        except BaseException as error:
            end_span(span, error)
            raise
        if span is not None and metadata is not None:
            successful = result.successful if unconverted is None else unconverted
            results = {
                "successful_messages_to_ack": [] if self._known else successful,
                "successful_messages_to_forward": successful if self._known else [],
                "failed_messages": result.failed,
            }
            span.stop({**metadata, **results})
        return result

    def _handle(
        self,
        chunk: list[Message],
        context: Any,
        scope: Scope,
        unconverted: list[Message] | None,
        metadata: dict[str, Any] | None,
    ) -> ChunkResult:
        """Handles a chunk.

        :param unconverted: Filled with the successes as ``handle_message`` returned them.
        :param metadata: That of each message's events, if they have a handler.
        """
        successful: list[Message] = []
        failed: list[Message] = []
        entered = [message for message in chunk if type(message.status) is not EntryFailure]
        prepared = entered
        if self._prepares and entered:
            prepared = self._prepare(entered, context, failed, scope)
        admitted: Iterable[Message] = prepared
        if self._keeps_order or len(entered) != len(chunk):
            admitted = self._admit(chunk, prepared, failed)
        with log_ids(message_id=None):
            self._handle_messages(
                admitted, context, successful, failed, scope, unconverted, metadata
            )
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
                    "expected all messages to be returned from prepare_messages: it received"
                    f" {len(chunk)} and returned {len(prepared)}",
                    code="prepare_messages_count_mismatch",
                )
            result = Returned.of(chunk, prepared, scope)
            if len(result.own) != len(chunk):
                detached = len(result.detached)
                raise PipelineError(
                    f"expected the messages of the chunk from prepare_messages, each once: of"
                    f" {len(chunk)} it returned {len(result.own)}{result.mismatch}"
                    + (f", {detached} without their acknowledger" if detached else ""),
                    code="prepare_messages_count_mismatch",
                )
        except protected() as error:
            log_failure("prepare_messages", self.pipeline, error, chunk)
            failed.extend(fail_all(chunk, status_of(error), scope))
            return []
        return prepared

    def _admit(
        self, chunk: list[Message], prepared: list[Message], failed: list[Message]
    ) -> Iterator[Message]:
        """Yields the prepared messages in their positions, and adds entry failures to ``failed``.

        Messages behind one of their group that failed and is redelivered are in neither, and so
        released without using an attempt.

        :param prepared: The other messages of the chunk; none, if ``prepare_messages`` failed them.
        :param failed: Has each yielded message, if it failed, when the next one is requested.
        """
        groups, released = self._held, 0
        groups.add(failed)  # the whole chunk, if prepare_messages failed it
        known = len(failed)
        others = iter(prepared)
        for received in chunk:
            is_failure = is_entry_failure(received)
            message = received if is_failure else next(others, None)
            if message is None:
                continue
            if groups.has(message):
                released += 1
                continue
            if is_failure:
                failed.append(message.replace(status=Status(*message.status)))
            else:
                yield message
            if len(failed) > known:
                groups.add(failed[known:])
                known = len(failed)
        if released:
            with log_ids(message_id=None):  # not the id of the last message
                log.info(
                    "%s released: an earlier message of the group failed and is redelivered.",
                    pluralize(released, "message"),
                )

    def _handle_messages(
        self,
        messages: Iterable[Message],
        context: Any,
        successful: list[Message],
        failed: list[Message],
        scope: Scope,
        unconverted: list[Message] | None,
        metadata: dict[str, Any] | None,
    ) -> None:
        # The loop over every message: the checks of _check are inlined here first.
        handle, key, known = self.pipeline.handle_message, self._key, self._known
        convert, stop, now = self._convert, self._run_stop, self._run_stop.now
        succeed, span = successful.append, None
        for message in messages:
            if now() >= stop.look_at and stop.enough():
                return
            speak_of(message.message_id)
            if metadata is not None:
                span = telemetry.Span("processor.message", {**metadata, "message": message})
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
                failed.append(scope.restored(message).replace(status=status_of(error)))
                end_span(span, error)
                continue
            except BaseException as error:
                end_span(span, error)
                if not isinstance(error, self._interrupts):
                    raise
                self._interrupt(message, error)
                continue
            if handled.status.kind == "ok":
                succeed(result)
                if unconverted is not None:
                    unconverted.append(handled)
            else:
                failed.append(result)
            if span is not None and metadata is not None:
                span.stop({**metadata, "message": handled})

    def _interrupt(self, message: Message, error: BaseException) -> None:
        """Stops the run; earlier results are kept, and the current message is released."""
        log.error(
            "%s ended handle_message at message %r, which is released without using an attempt;"
            " earlier results are kept",
            type(error).__name__,
            message.message_id,
        )
        self._run_stop.request("interrupted", at_once=True)

    def _check(self, result: Any, message: Message, scope: Scope) -> None:
        """Raises unless ``result`` is ``message`` with a valid batcher; a failed one is valid."""
        if type(result) is not Message:
            raise PipelineError(
                f"expected a Message from handle_message, got: {result!r:.200}",
                code="handle_message_bad_return",
            )
        if not is_of(result, message, scope):
            raise PipelineError(
                f"expected handle_message to return message {message.message_id!r}, changed by its"
                f" put_… methods; got another: {result!r:.200}",
                code="handle_message_bad_return",
            )
        if result.ok and self._known and result.batcher not in self._known:
            raise PipelineError(
                f"message was set to unknown batcher {result.batcher!r}. The known batchers are"
                f" {list(self.pipeline.batchers)}",
                code="unknown_batcher",
            )
