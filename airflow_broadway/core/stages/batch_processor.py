"""The batch processor: runs ``handle_batch`` on a batch, then ``handle_failed``, then settles.

For a batcher with a sink, the returned rows are committed before the successful messages are
settled.  The failed ones are settled before the commit, so that their verdicts can be stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from airflow_broadway.core import telemetry
from airflow_broadway.core.collector import collect_after_batch
from airflow_broadway.core.errors import LeaseLapsed, PipelineError, StagingDamaged, StagingError
from airflow_broadway.core.log_context import log_ids
from airflow_broadway.core.model.acks import Scope, ack_messages
from airflow_broadway.core.model.batch_info import BatchInfo
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.model.sink import CommitInDoubt, Rows
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.callbacks import (
    Returned,
    context_of,
    end_span,
    expect_messages,
    fail_all,
    log_failure,
    log_mismatch,
    protected,
    run_handle_failed,
    status_of,
)
from airflow_broadway.core.stages.processor import Ack

log = logging.getLogger(__name__)


class BatchResult(NamedTuple):
    """The result of one batch.

    :param successful: Messages settled as successful, in the order in which they were returned.
    :param failed: Messages settled as failed, as ``handle_failed`` returned them.
    :param missing: Messages that no callback returned: not settled, and released with the lease.
    """

    successful: list[Message]
    failed: list[Message]
    missing: list[Message]


#: Commits rows: ``commit(rows, info, successful, failed)``; an error fails the batch.
CommitRows = Callable[[Any, BatchInfo, list[Message], list[Message]], None]


def drop_rows(rows: Any, info: BatchInfo, successful: Any, failed: Any) -> None:
    """Commits nothing: for tests."""


class BatchProcessorStage:
    """One batch processor of a Python batcher; handles one batch at a time.

    :param batcher: The batcher's name.
    :param index: The index of this batch processor among ``concurrency``, from 0.
    :param ack: Settles a batch's result: ``ack(successful, failed)``; called twice for a batch
        whose rows are committed.
    :param commit: Commits the rows of a batcher with a sink.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batcher: str,
        *,
        index: int = 0,
        ack: Ack = ack_messages,
        commit: CommitRows = drop_rows,
    ) -> None:
        self.pipeline = pipeline
        self.batcher = batcher
        self.index = index
        self._ack = ack
        self._commit = commit
        options = pipeline.batchers[batcher]
        self._returns_rows = options.sink is not None and options.engine == "python"
        self.name = f"{pipeline.name}.Broadway.BatchProcessor_{batcher}_{index}"

    def handle(
        self, messages: list[Message], info: BatchInfo, refused: Status | None = None
    ) -> BatchResult:
        """Runs ``handle_batch`` on one batch and settles its messages.

        Exceptions of callbacks never propagate; ``KeyboardInterrupt`` and similar ones do, and then
        only messages that the callback settled itself are settled.

        :param refused: The status with which the batch fails unhandled: its splitter raised.
        """
        context = context_of(self.pipeline)
        span, metadata = None, {}
        if telemetry.observed("batch_processor"):
            metadata = {
                "topology_name": self.pipeline.name,
                "name": self.name,
                "index": self.index,
                "context": context,
                "producer": self.pipeline.producer,
                "batch_info": info,
            }
            span = telemetry.Span("batch_processor", {**metadata, "messages": messages})
        successful: list[Message] = []
        rows: Any = None
        try:
            with Scope("batch") as scope, log_ids(batcher=self.batcher, batch_id=info.batch_id):
                if refused is not None:
                    failed = fail_all(messages, refused, scope)
                elif self._returns_rows:
                    rows, successful, failed = self._call_for_rows(messages, info, context, scope)
                else:
                    successful, failed = self._call_handle_batch(messages, info, context, scope)
                failed = run_handle_failed(self.pipeline, failed, context, scope)
                if successful and _count(rows):
                    successful, failed = self._commit_rows(
                        rows, info, successful, failed, context, scope
                    )
                else:
                    self._ack(successful, failed)
        except BaseException as error:
            end_span(span, error)
            raise
        finally:
            collect_after_batch()
        if span is not None:
            results = {"successful_messages": successful, "failed_messages": failed}
            span.stop({**metadata, **results})
        settled = {message.message_id for message in (*successful, *failed)}
        missing = [message for message in messages if message.message_id not in settled]
        return BatchResult(successful, failed, missing)

    def _call_handle_batch(
        self, messages: list[Message], info: BatchInfo, context: Any, scope: Scope
    ) -> tuple[list[Message], list[Message]]:
        """Calls ``handle_batch``; returns the successful and the failed messages."""
        try:
            returned = self._call(messages, info, context)
        except StagingDamaged:  # of metadata, which is decoded when it is read
            raise
        except protected() as error:
            log_failure("handle_batch", self.pipeline, error, messages)
            return [], fail_all(messages, status_of(error), scope)
        successful: list[Message] = []
        failed: list[Message] = []
        result = Returned.of(messages, returned, scope)
        for message in result.own:
            (successful if message.status.kind == "ok" else failed).append(message)
        failed += [self._fail_detached(message, scope) for message in result.detached]
        if len(returned) != len(messages) or result.mismatch:
            log_mismatch(
                "handle_batch",
                self.pipeline,
                len(messages),
                f"only {len(returned)}{result.mismatch}",
                code="handle_batch_count_mismatch",
            )
        return successful, failed

    def _call_for_rows(
        self, messages: list[Message], info: BatchInfo, context: Any, scope: Scope
    ) -> tuple[Any, list[Message], list[Message]]:
        """Calls ``handle_batch``; returns the rows, the successful and the failed messages."""
        if not self.pipeline.defines("handle_batch"):
            return [_default_row(message) for message in messages], messages, []
        try:
            returned: Any = self.pipeline.handle_batch(self.batcher, list(messages), info, context)
            result = returned if isinstance(returned, Rows) else Rows(returned)
            _check_rows(result.rows)
            marked = _check_failed(messages, result.failed, scope)
        except StagingDamaged:
            raise
        except protected() as error:
            log_failure("handle_batch", self.pipeline, error, messages)
            return None, [], fail_all(messages, status_of(error), scope)
        successful = [message for message in messages if message.message_id not in marked]
        return result.rows, successful, list(marked.values())

    def _commit_rows(
        self,
        rows: Any,
        info: BatchInfo,
        successful: list[Message],
        failed: list[Message],
        context: Any,
        scope: Scope,
    ) -> tuple[list[Message], list[Message]]:
        """Settles the failed messages, commits the rows, then settles the others.

        :raises LeaseLapsed: If the run no longer holds the messages.
        :raises CommitInDoubt: If it is unknown whether the commit landed.
        :raises StagingError: If the verdicts on failed messages cannot be stored.
        """
        if failed:
            self._ack([], failed)
        try:
            self._commit(rows, info, successful, failed)
        except (LeaseLapsed, CommitInDoubt, StagingError):
            raise
        except protected() as error:
            log_failure("commit", self.pipeline, error, successful)
            lost = fail_all(successful, status_of(error), scope)
            lost = run_handle_failed(self.pipeline, lost, context, scope)
            self._ack([], lost)
            return [], [*failed, *lost]
        self._ack(successful, [])
        return successful, failed

    def _fail_detached(self, message: Message, scope: Scope) -> Message:
        """Fails a message that was returned without its acknowledger."""
        error = PipelineError(
            "expected handle_batch to return its messages, changed by their put_… methods;"
            f" message {message.message_id!r} was returned without its acknowledger",
            code="handle_batch_bad_element",
        )
        log_failure("handle_batch", self.pipeline, error, [message])
        return scope.restored(message).replace(status=status_of(error))

    def _call(self, messages: list[Message], info: BatchInfo, context: Any) -> list[Message]:
        passed = list(messages)
        try:
            returned: Any = self.pipeline.handle_batch(self.batcher, passed, info, context)
        except AttributeError as error:
            if error.obj is passed:  # used as a DataFrame
                hint = (
                    "with engine='python' handle_batch gets a list of messages; a DataFrame comes"
                    " with Batcher(engine='spark')"
                )
                error.args = (f"{error}: {hint}",)
            raise
        return expect_messages(
            "handle_batch",
            returned,
            code="handle_batch_bad_return",
            element_code="handle_batch_bad_element",
        )


def _default_row(message: Message) -> dict[str, Any]:
    """Returns the row of a message without ``handle_batch``."""
    data = message.data
    columns = data if isinstance(data, Mapping) else {"data": data}
    return {"message_id": message.message_id, **columns}


def _count(rows: Any) -> int:
    """Returns the number of rows; nothing is committed without any."""
    return 0 if rows is None else int(getattr(rows, "num_rows", None) or len(rows))


def _check_rows(rows: Any) -> None:
    if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
        return
    if hasattr(rows, "num_rows") and hasattr(rows, "schema"):
        return
    raise PipelineError(
        "with a sink, handle_batch returns the rows to commit: a list of dicts or a pyarrow.Table,"
        f" or Rows(rows, failed=[…]); got: {rows!r:.200}",
        code="handle_batch_bad_return",
    )


def _check_failed(passed: list[Message], failed: Any, scope: Scope) -> dict[str, Message]:
    """Returns the failed messages by their ids.

    :raises PipelineError: If they are not messages of the batch.
    """
    result = Returned.of(passed, expect_messages("Rows(…, failed=…)", list(failed)), scope)
    if result.mismatch or result.detached:
        raise PipelineError(
            "Rows(…, failed=…) takes messages of the batch, as returned by their failed(reason)"
            f"{result.mismatch}",
            code="handle_batch_bad_element",
        )
    return {
        message.message_id: message if message.status.kind != "ok" else message.failed("failed")
        for message in result.own
    }
