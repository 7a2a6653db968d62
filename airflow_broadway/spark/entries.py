"""The entries of a batch: verdicts on messages that did not succeed.

Successful messages need no entry.  A failed message gets an entry with its verdict, after
``handle_failed``; a message without an outcome gets an entry that releases it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.custody.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.custody.in_process import entry_of
from airflow_broadway.core.custody.protocol import Delivery, Entry
from airflow_broadway.core.custody.verdicts import RELEASE
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.formats.entries import dump_entry
from airflow_broadway.core.formats.plan import PlannedBatch, plain_key
from airflow_broadway.core.model.acks import (
    NO_ACK,
    AckRef,
    Scope,
    ack_messages_or_raise,
    is_settled,
)
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.stages.callbacks import run_handle_failed
from airflow_broadway.spark.frame import BatchFrames, as_utc, to_python
from airflow_broadway.spark.results import Failed, Outcomes
from airflow_broadway.spark.unsuccessful import MISSING, Unsuccessful, unsuccessful

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_broadway.core.pipeline import Pipeline

#: The maximum number of messages per call of ``handle_failed``.
CHUNK = 1000


@dataclass(slots=True)
class Counts:
    """Counts of unsuccessful messages of a batch, updated while its entries are streamed.

    :param failed: Messages with a verdict.
    :param missing: Messages without an outcome.
    :param unnamed: Missing messages that ``handle_batch`` did not return.
    """

    failed: int = 0
    missing: int = 0
    unnamed: int = 0


class Judge:
    """Determines the verdicts on messages of one plan's batches; used from many threads.

    :param context: The ``context`` argument of callbacks.
    :param handle_failed: Whether to call ``handle_failed``, if the pipeline defines it.  The data
        of failed messages are read for this callback only.
    """

    def __init__(
        self, pipeline: Pipeline, context: Any, frames: BatchFrames, *, handle_failed: bool = True
    ) -> None:
        self._pipeline = pipeline
        self._context = context
        self._frames = frames
        self._handle_failed = handle_failed
        self._data = handle_failed and pipeline.defines("handle_failed")

    def lines(
        self,
        spark: SparkSession,
        batch: PlannedBatch,
        result: Failed | Outcomes | Status | None,
        counts: Counts,
    ) -> Iterator[str]:
        """Streams the entries of a batch as lines; with their source, in a batch of several
        generations.

        :param result: The result of :func:`results.read`, or the status of the whole batch.
        :param counts: Updated with each entry.
        :raises PipelineError: If the result of ``handle_batch`` names messages that are not of the
            batch, or has an unknown status.
        """
        chunk: list[Unsuccessful] = []
        for message in unsuccessful(spark, self._frames, batch, result, data=self._data):
            if message.row["_acked"]:
                # Settled by ack_immediately: not settled again, but passed to handle_failed.
                if message.status is MISSING:
                    continue
                counts.failed += 1
                if not self._data:
                    continue
            elif message.status is MISSING:
                counts.missing += 1
                counts.unnamed += 1
                row = message.row
                data = _delivery_of_row(row)
                body = data.payload, data.properties
                entry = Entry(row["message_id"], data.receipt, RELEASE, row["attempt"], *body)
                yield dump_entry(entry, source=_source_index(row, batch))
                continue
            chunk.append(message)
            if len(chunk) >= CHUNK:
                yield from self._judged(chunk, batch, counts)
                chunk = []
        if chunk:
            yield from self._judged(chunk, batch, counts)

    # -- verdicts --------------------------------------------------------------------------------

    def _judged(
        self, chunk: list[Unsuccessful], batch: PlannedBatch, counts: Counts
    ) -> Iterator[str]:
        sink = _Sink()
        acknowledger = RunAcknowledger(self._pipeline.producer, sink)
        messages = [self._message(message, batch, acknowledger) for message in chunk]
        with Scope("batch") as scope:
            handled = messages
            if self._handle_failed:
                handled = run_handle_failed(self._pipeline, messages, self._context, scope)
            ack_messages_or_raise([], handled)
        # By generation, too: a message may be in two of them, and each settles its own.
        left = {
            (message.message_id, message.acknowledger.ref): message
            for message in messages
            if not is_settled(message)
        }
        for message, verdict in sink.judged:
            source = message.acknowledger.ref
            if left.pop((message.message_id, source), None) is None:
                continue  # returned twice by handle_failed, or not of this batch
            counts.failed += 1
            yield dump_entry(entry_of(message, verdict), source=source)
        for (_, source), message in left.items():  # handle_failed did not return it
            counts.missing += 1
            yield dump_entry(entry_of(message, RELEASE), source=source)

    def _message(
        self, unsettled: Unsuccessful, batch: PlannedBatch, acknowledger: RunAcknowledger
    ) -> Message:
        row = unsettled.row
        fields: dict[str, Any] = {"data": None}
        if self._data:
            fields = {
                "data": self._python(row["data"]),
                "metadata": row["metadata"] or {},
                "batch_key": _batch_key(row["batch_key"], batch),
                "received_at": as_utc(row["received_at"]),
                "position": row["position"],
            }
        return Message(
            message_id=row["message_id"],
            attempt=row["attempt"],
            redelivered=bool(row["redelivered"]),
            batcher=self._frames.plan.batcher,
            status=unsettled.status,
            acknowledger=NO_ACK
            if row["_acked"]
            else AckRef(acknowledger, _source_index(row, batch), _delivery_of_row(row)),
            **fields,
        )

    def _python(self, value: Any) -> Any:
        """Returns the data as returned by ``handle_message``, within the limits of the schema."""
        if value is None:
            return None
        if self._frames.schema is not None:
            return to_python(value, self._frames.schema)
        return bytes(value) if self._frames.plan.as_bytes else json.loads(value)


class _Sink:
    """Collects the verdicts of one chunk."""

    def __init__(self) -> None:
        self.judged: list[Judged] = []

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        self.judged += successful
        self.judged += failed

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        raise PipelineError(
            "ack_immediately is not possible in a Spark batch: the driver has no connection to the"
            " broker; use configure_ack, or a Python batcher"
        )


def _delivery_of_row(row: Any) -> Delivery:
    """Returns the delivery of a row's message."""
    payload = row["_payload"]
    return Delivery(
        receipt=row["_receipt"] or "",
        payload=None if payload is None else bytes(payload),
        properties=row["_properties"],
        on_success=row["_on_success"],
        on_failure=row["_on_failure"],
    )


def _source_index(row: Any, batch: PlannedBatch) -> int | None:
    """Returns the index of a row's generation; ``None`` in a batch of one generation."""
    return int(row["source"]) if len(batch.sources) > 1 else None


def _batch_key(text: str | None, batch: PlannedBatch) -> Any:
    """Returns a message's key: the batch's, or the row's in a batch of several keys."""
    if batch.batch_key is not None:
        return plain_key(batch.batch_key)
    return None if text == "null" else text
