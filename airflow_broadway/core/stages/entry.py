"""Prepares messages for the processors: runs ``transformer``, then ``partition_by``.

Both run before a message is assigned to a chunk.  An exception fails that message alone: it becomes
an entry failure, which the processor of its lane counts, in order, among its own failures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.model.acks import is_settled
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.batcher import partitioner
from airflow_broadway.core.stages.callbacks import log_failure, protected, status_of

#: The lane of a message that ``partition_by`` or ``transformer`` failed.
_FAILED_LANE: Final = 0


class EntryFailure(Status):
    """The status of a message that failed before it reached a processor."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[Status], tuple[str, Any, str]]:
        return EntryFailure, (self.kind, self.reason, self.stacktrace)


def is_entry_failure(message: Message) -> bool:
    """Returns whether the message failed before it reached a processor."""
    return type(message.status) is EntryFailure


class MessageEntry:
    """Transforms messages, and assigns lanes.

    :param transformer: The producer's ``transformer``, or ``None``.
    """

    def __init__(
        self, pipeline: Pipeline, transformer: Callable[[Any], Message] | None = None
    ) -> None:
        self._pipeline = pipeline
        self._transformer = transformer
        self._partition = partitioner(pipeline.processors)
        #: Whether messages have lanes.
        self.has_lanes = self._partition is not None
        #: Whether any callback is called.
        self.has_callbacks = self.has_lanes or transformer is not None

    def enter(self, message: Message) -> tuple[int | None, Message]:
        """Returns the message's lane, and the transformed message: an entry failure if one of the
        callbacks raised.
        """
        callback, lane = "transformer", _FAILED_LANE if self.has_lanes else None
        try:
            if self._transformer is not None:
                message = of_delivery(self._transformer(message), message)
            callback = "partition_by"
            if self._partition is not None:
                lane = self._partition(message)
        except protected() as error:
            log_failure(callback, self._pipeline, error, [message])
            message = message.replace(status=EntryFailure(*status_of(error)))
        return lane, message


def of_delivery(transformed: Any, delivery: Any) -> Message:
    """Returns a transformer's result, with the delivery's own attributes.

    The id, attempt, timestamp and position of the delivery are kept, even if the transformer
    created a new message.

    :param delivery: The message that was transformed; other values have no attributes to keep.

    :raises PipelineError: If the result is not a message, or has another id.
    """
    if type(transformed) is not Message:
        raise PipelineError(
            f"the transformer must return a message, got: {transformed!r:.200}",
            code="producer_crash",
        )
    message: Message = transformed
    if type(delivery) is not Message:
        return message
    if is_settled(message) and not is_settled(delivery):  # created without the acknowledger
        message = message.with_acknowledger(delivery.acknowledger)
    if (
        message.received_at is delivery.received_at
        and message.message_id == delivery.message_id
        and message.attempt == delivery.attempt
        and message.redelivered == delivery.redelivered
    ):
        return message
    if delivery.message_id and message.message_id not in ("", delivery.message_id):
        raise PipelineError(
            f"the transformer must keep the message_id: it changed {delivery.message_id!r} to"
            f" {message.message_id!r}, but the broker identifies the message by its id",
            code="producer_crash",
        )
    return Message(
        message.data,
        metadata=message.metadata,
        acknowledger=message.acknowledger,
        message_id=delivery.message_id or message.message_id,
        batcher=message.batcher,
        batch_key=message.batch_key,
        batch_mode=message.batch_mode,
        status=message.status,
        attempt=delivery.attempt,
        redelivered=delivery.redelivered,
        received_at=delivery.received_at,
        position=delivery.position,
        size=delivery.size,
    )
