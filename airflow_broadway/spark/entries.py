"""The entries of a batch: the verdicts on those of its messages that did not succeed.

A success needs none.  A failed message gets one with its verdict, after ``handle_failed`` has seen
it; a message without an outcome gets one that releases it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.custody.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.custody.protocol import Delivery, Entry
from airflow_broadway.core.custody.verdicts import RELEASE, Verdict
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.formats.entries import EntryLine
from airflow_broadway.core.formats.plan import PlannedBatch, plain_key
from airflow_broadway.core.model.acks import NO_ACK, AckRef, Scope, ack_messages, is_settled
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.stages.callbacks import run_handle_failed
from airflow_broadway.spark.frame import BatchFrames, as_utc, to_python
from airflow_broadway.spark.results import Failed, Outcomes
from airflow_broadway.spark.unsuccessful import MISSING, Unsuccessful, unsuccessful

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_broadway.core.pipeline import Pipeline

#: Messages that one call of ``handle_failed`` gets at most.
CHUNK = 1000


class Counts:
    """How many messages of a batch did not succeed; counted while its entries are streamed.

    ``failed``: with a verdict; ``missing``: without an outcome; ``unnamed``: those of the latter
    that ``handle_batch`` left out.
    """

    __slots__ = ("failed", "missing", "unnamed")

    def __init__(self) -> None:
        self.failed = 0
        self.missing = 0
        self.unnamed = 0


class Judge:
    """Gives the messages of one plan's batches their verdicts; used from many threads.

    :param context: What callbacks get as ``context``.
    :param handle_failed: Whether ``handle_failed`` is called, where the pipeline has it.  Only for
        its sake is the data of failed messages read back.
    """

    def __init__(
        self, pipeline: Pipeline, context: Any, frames: BatchFrames, *, handle_failed: bool = True
    ) -> None:
        self._pipeline = pipeline
        self._context = context
        self._frames = frames
        self._handle_failed = handle_failed
        self._data = handle_failed and pipeline.defines("handle_failed")

    def entries(
        self,
        spark: SparkSession,
        batch: PlannedBatch,
        found: Failed | Outcomes | Status | None,
        counts: Counts,
    ) -> Iterator[EntryLine]:
        """The entries of a batch, streamed; in a batch of several generations each with its source.

        :param found: What :func:`results.read` gave, or the status that the whole batch has.
        :param counts: Raised as entries are made.
        :raises PipelineError: If what ``handle_batch`` returned names messages that are not of the
            batch, or has a status that is not known.
        """
        chunk: list[Unsuccessful] = []
        for each in unsuccessful(spark, self._frames, batch, found, data=self._data):
            if each.row["_acked"]:
                # ack_immediately settled it before it came here: nobody settles it again, but
                # handle_failed gets it.
                if each.status is MISSING:
                    continue
                counts.failed += 1
                if not self._data:
                    continue
            elif each.status is MISSING:
                counts.missing += 1
                counts.unnamed += 1
                source = _source(each.row, batch)
                row = each.row
                yield _line(row["message_id"], row["attempt"], _received(row), RELEASE, source)
                continue
            chunk.append(each)
            if len(chunk) >= CHUNK:
                yield from self._judged(chunk, batch, counts)
                chunk = []
        if chunk:
            yield from self._judged(chunk, batch, counts)

    # -- verdicts --------------------------------------------------------------------------------

    def _judged(
        self, chunk: list[Unsuccessful], batch: PlannedBatch, counts: Counts
    ) -> Iterator[EntryLine]:
        sink = _Sink()
        acknowledger = RunAcknowledger(self._pipeline.producer, sink)
        messages = [self._message(each, batch, acknowledger) for each in chunk]
        with Scope("batch") as scope:
            handled = messages
            if self._handle_failed:
                handled = run_handle_failed(self._pipeline, messages, self._context, scope)
            ack_messages([], handled, on_error=_raise)
        # By generation, too: a message may have come in two of them, and each settles its own.
        left = {
            (each.message_id, each.acknowledger.ref): each
            for each in messages
            if not is_settled(each)
        }
        for message, verdict in sink.judged:
            source = message.acknowledger.ref
            if left.pop((message.message_id, source), None) is None:
                continue  # returned twice by handle_failed, or not of this batch
            counts.failed += 1
            yield _line(message.message_id, message.attempt, _delivery(message), verdict, source)
        for (message_id, source), message in left.items():  # handle_failed did not return it
            counts.missing += 1
            yield _line(message_id, message.attempt, _delivery(message), RELEASE, source)

    def _message(
        self, each: Unsuccessful, batch: PlannedBatch, acknowledger: RunAcknowledger
    ) -> Message:
        row = each.row
        seen: dict[str, Any] = {}
        if self._data:
            seen = {
                "metadata": row["metadata"] or {},
                "batch_key": _batch_key(row["batch_key"], batch),
                "received_at": as_utc(row["received_at"]),
                "position": row["position"],
            }
        return Message(
            self._python(row["data"]) if self._data else None,
            message_id=row["message_id"],
            attempt=row["attempt"],
            redelivered=bool(row["redelivered"]),
            batcher=self._frames.plan.batcher,
            status=each.status,
            acknowledger=NO_ACK
            if row["_acked"]
            else AckRef(acknowledger, _source(row, batch), _received(row)),
            **seen,
        )

    def _python(self, value: Any) -> Any:
        """The data as ``handle_message`` left it, as far as the schema carries it."""
        if self._frames.schema is not None:
            return to_python(value, self._frames.schema.struct)
        if self._frames.plan.as_bytes:
            return None if value is None else bytes(value)
        return None if value is None else json.loads(value)


class _Sink:
    """Keeps the verdicts of one chunk."""

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


def _raise(acknowledger: Any, ref: Any, error: Exception) -> None:
    raise error


def _received(row: Any) -> Delivery:
    """What came with the message of a row."""
    payload = row["_payload"]
    return Delivery(
        receipt=row["_receipt"] or "",
        payload=None if payload is None else bytes(payload),
        properties=row["_properties"],
        on_success=row["_on_success"],
        on_failure=row["_on_failure"],
    )


def _source(row: Any, batch: PlannedBatch) -> int | None:
    """Which generation a row is of, in a batch of several: an index; ``None`` in a batch of one."""
    return int(row["source"]) if len(batch.sources) > 1 else None


def _line(
    message_id: str, attempt: int, data: Delivery, verdict: Verdict, source: int | None
) -> EntryLine:
    # With its body in any case: some brokers release a message by publishing it again.
    entry = Entry(message_id, data.receipt, verdict, attempt, data.payload, data.properties)
    return EntryLine(entry, source, settled=False)


def _delivery(message: Message) -> Delivery:
    data = message.acknowledger.data
    return data if isinstance(data, Delivery) else Delivery()


def _batch_key(text: str | None, batch: PlannedBatch) -> Any:
    """A message's key: its batch's; in a batch of several keys, the text in the message's row."""
    if batch.batch_key is not None:
        return plain_key(batch.batch_key)
    return None if text == "null" else text
