"""The batch processor: ``handle_batch`` on a whole batch, ``handle_failed``, then the acks."""

from __future__ import annotations

import logging
from typing import Any, Final, NamedTuple

from airflow_broadway.core import telemetry
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.acks import Scope, ack_messages
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.callbacks import (
    Returned,
    context_of,
    end_span,
    expect_messages,
    fail_all,
    log_failure,
    protected,
    run_handle_failed,
    status_of,
)
from airflow_broadway.core.stages.processor import Ack
from airflow_broadway.core.text import many

log = logging.getLogger(__name__)

_BATCH: Final = ("batch_processor.start", "batch_processor.stop", "batch_processor.exception")


class BatchResult(NamedTuple):
    """What became of one batch.

    :param successful: Those settled as successful, in the order in which they were returned.
    :param failed: Those settled as failed, as ``handle_failed`` returned them.
    :param missing: Those that no callback returned: not settled, and given back with the lease.
    """

    successful: list[Message]
    failed: list[Message]
    missing: list[Message]


class BatchProcessorStage:
    """One batch processor of a Python batcher; handles one batch at a time.

    :param batcher: The batcher's name.
    :param index: Which of ``concurrency`` batch processors this is, from 0.
    :param ack: Settles a batch's result: ``ack(successful, failed)``.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batcher: str,
        *,
        index: int = 0,
        ack: Ack = ack_messages,
    ) -> None:
        self.pipeline = pipeline
        self.batcher = batcher
        self.index = index
        self._ack = ack
        self.name = f"{pipeline.name}.Broadway.BatchProcessor_{batcher}_{index}"

    def handle(
        self, messages: list[Message], info: BatchInfo, refused: Status | None = None
    ) -> BatchResult:
        """Run ``handle_batch`` on one batch and settle its messages.

        An exception of a callback never gets out; ``KeyboardInterrupt`` and its like do, and then
        nothing has been settled but what the callback settled itself.

        :param refused: The status with which the batch fails instead: its splitter raised.
        """
        context = context_of(self.pipeline)
        span = None
        if telemetry.handlers(*_BATCH):
            about = {**self._about(context), "messages": messages, "batch_info": info}
            span = telemetry.Span("batch_processor", about)
        try:
            with Scope("batch") as scope, log_ids(batcher=self.batcher, batch_id=info.batch_id):
                result = self._handle(messages, info, context, scope, refused)
        except BaseException as error:
            end_span(span, error)
            raise
        if span is not None:
            span.stop(
                {
                    **self._about(context),
                    "batch_info": info,
                    "successful_messages": result.successful,
                    "failed_messages": result.failed,
                }
            )
        return result

    def _about(self, context: Any) -> dict[str, Any]:
        return {
            "topology_name": self.pipeline.name,
            "name": self.name,
            "index": self.index,
            "context": context,
            "producer": self.pipeline.producer,
        }

    def _handle(
        self,
        messages: list[Message],
        info: BatchInfo,
        context: Any,
        scope: Scope,
        refused: Status | None,
    ) -> BatchResult:
        successful: list[Message] = []
        if refused is None:
            successful, failed = self._called(messages, info, context, scope)
        else:
            failed = fail_all(messages, refused, scope)
        if failed:
            failed = run_handle_failed(self.pipeline, failed, context, scope)
        self._ack(successful, failed)
        return BatchResult(successful, failed, _missing(messages, successful, failed))

    def _called(
        self, messages: list[Message], info: BatchInfo, context: Any, scope: Scope
    ) -> tuple[list[Message], list[Message]]:
        """Call ``handle_batch``; return what succeeded and what failed by it."""
        try:
            returned = self._call(messages, info, context)
        except protected() as error:
            log_failure("handle_batch", self.pipeline, error, messages)
            return [], fail_all(messages, status_of(error), scope)
        successful: list[Message] = []
        failed: list[Message] = []
        found = Returned.of(messages, returned, scope)
        for message in found.own:
            (successful if message.status.kind == "ok" else failed).append(message)
        failed += [self._refused(message, scope) for message in found.anew]
        if len(returned) != len(messages) or found.odd:
            self._log_mismatch(len(messages), len(returned), found.odd)
        return successful, failed

    def _refused(self, message: Message, scope: Scope) -> Message:
        """A message that came back without what settles it, as a failure."""
        error = PipelineError(
            "expected from handle_batch the messages that it was given, changed by their put_…"
            f" functions; message {message.message_id!r} came back without what settles it",
            code="handle_batch_bad_element",
        )
        log_failure("handle_batch", self.pipeline, error, [message])
        return scope.restored(message).with_status(status_of(error))

    def _log_mismatch(self, given: int, returned: int, odd: str) -> None:
        log.error(
            "%s.handle_batch received %s and returned only %d%s; one that it did not"
            " return is not settled, and goes back to its broker when the run ends",
            type(self.pipeline).__name__,
            many(given, "message"),
            returned,
            odd,
            extra={"code": "handle_batch_count_mismatch"},
        )

    def _call(self, messages: list[Message], info: BatchInfo, context: Any) -> list[Message]:
        if not self.pipeline.defines("handle_batch"):
            raise PipelineError(
                f"{type(self.pipeline).__name__} defines no handle_batch",
                code="handle_batch_undefined",
            )
        passed = list(messages)
        try:
            returned: Any = self.pipeline.handle_batch(self.batcher, passed, info, context)
        except AttributeError as error:
            if error.obj is passed:  # it was used as a DataFrame
                cure = (
                    "with engine='python' handle_batch gets a list of messages; a DataFrame comes"
                    " with Batcher(engine='spark')"
                )
                error.args = (f"{error}: {cure}",)
            raise
        return expect_messages(
            "handle_batch",
            returned,
            code="handle_batch_bad_return",
            element_code="handle_batch_bad_element",
        )


def _missing(
    messages: list[Message], successful: list[Message], failed: list[Message]
) -> list[Message]:
    """Those of ``messages`` that are in neither list, by id."""
    settled = {message.message_id for message in successful}
    settled.update(message.message_id for message in failed)
    return [message for message in messages if message.message_id not in settled]
