"""From what ``handle_batch`` returned to the entries of a batch: its exceptions, one by one.

A success needs no line; a failed message gets one with its verdict, and a message without any
outcome one that releases it.  Only the rows of those messages are read back, a small partition at a
time, so a batch of millions may fail in a driver of little memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from airflow_broadway.core.custody.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.custody.protocol import Delivery, Entry
from airflow_broadway.core.custody.verdicts import MAX_REASON, RELEASE, Verdict
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.formats.entries import EntryLine
from airflow_broadway.core.formats.plan import PlannedBatch, plain_key
from airflow_broadway.core.model.acks import NO_ACK, AckRef, Scope, ack_messages, is_settled
from airflow_broadway.core.model.message import Message, Status
from airflow_broadway.core.schema.ddl import Array, Atomic, DataType, Map, Schema, Struct
from airflow_broadway.core.stages.callbacks import run_handle_failed
from airflow_broadway.spark.frame import BatchFrames
from airflow_broadway.spark.results import FAILED_STATUS, OK_STATUS, Failed, Outcomes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_broadway.core.pipeline import Pipeline

__all__ = ["Counts", "Judge"]

#: Up to this many failures are looked up by their ids; more are joined.
SMALL = 1000
#: Messages that one call of ``handle_failed`` gets at most.
CHUNK = 1000
#: What a partition holds at most, about, of what is read back: the driver holds one whole.
PART_ROWS, PART_BYTES = 10_000, 8 * 1024 * 1024
#: Ids named in an error.
SHOWN = 3

_MISSING = Status("missing")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Counts:
    """What the entries of a batch came to; filled while they are streamed.

    ``missing``: messages without an outcome; ``unnamed``: those of them that ``handle_batch`` left
    out.
    """

    __slots__ = ("failed", "missing", "unnamed")

    def __init__(self) -> None:
        self.failed = 0
        self.missing = 0
        self.unnamed = 0


class _Exception(NamedTuple):
    """A message that did not succeed: its row, and how it stands."""

    row: Any
    status: Status


class Judge:
    """Turns the exceptions of one plan's batches into entries; used from many threads.

    :param context: What the callbacks get.
    :param handle_failed: Whether that callback is called, where the pipeline has it: only for it is
        the data of what failed read back.
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
        :raises PipelineError: If what ``handle_batch`` returned names other messages, or standings
            that there are not.
        """
        if found is None:
            return
        chunk: list[_Exception] = []
        for each in self._exceptions(spark, batch, found):
            if each.row["_acked"]:
                # Settled by ack_immediately before it came here: nobody settles it again, but
                # handle_failed is told.
                if each.status is _MISSING:
                    continue
                counts.failed += 1
                if not self._data:
                    continue
            elif each.status is _MISSING:
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
        self, chunk: list[_Exception], batch: PlannedBatch, counts: Counts
    ) -> Iterator[EntryLine]:
        sink = _Sink()
        acknowledger = RunAcknowledger(self._pipeline.producer, sink)
        messages = [self._message(each, batch, acknowledger) for each in chunk]
        with Scope("batch") as scope:
            handled = messages
            if self._handle_failed:
                handled = run_handle_failed(self._pipeline, messages, self._context, scope)
            ack_messages([], handled, on_error=_raise)
        # By generation, too: a message may have come to two of them, and each settles its own.
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
        self, each: _Exception, batch: PlannedBatch, acknowledger: RunAcknowledger
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
        """The data as ``handle_message`` left it, as far as its schema carries it."""
        if self._frames.schema is not None:
            return to_python(value, self._frames.schema.struct)
        if self._frames.plan.as_bytes:
            return None if value is None else bytes(value)
        return None if value is None else json.loads(value)

    # -- which messages --------------------------------------------------------------------------

    def _exceptions(
        self, spark: SparkSession, batch: PlannedBatch, found: Failed | Outcomes | Status
    ) -> Iterator[_Exception]:
        rows = self._frames.private(spark, batch, data=self._data)
        if isinstance(found, Status):
            return (_Exception(row, found) for row in _in_parts(rows, batch).toLocalIterator())
        if isinstance(found, Failed):
            named = _named_of_failed(spark, found)
            if named is None:
                return iter(())
            few: list[Any] | None = (
                named if isinstance(named, list) else named.limit(SMALL + 1).collect()
            )
        else:
            named = _named_of_outcomes(found)
            few = named.limit(SMALL + 1).collect() if batch.size <= SMALL else None
        complete = isinstance(found, Outcomes)
        if few is not None and len(few) <= SMALL:
            return _from_few(rows, few, complete=complete)
        if isinstance(named, list):
            named = spark.createDataFrame(named, _NAMED)
        return _from_join(rows, named, batch, complete=complete)


def _in_parts(rows: DataFrame, batch: PlannedBatch) -> DataFrame:
    """The same rows in partitions of which one at a time fits into a small driver."""
    parts = max(-(-batch.size // PART_ROWS), -(-batch.bytes // PART_BYTES))
    return rows if parts <= 1 else rows.repartition(parts, "message_id")


#: A row of what was named; of several for one message the highest rank counts.
_NAMED = "message_id string, rank int, status string, reason string"


def _named_of_failed(spark: SparkSession, found: Failed) -> Any:
    """What ``failed()`` named: a list of tuples, or a DataFrame of them; ``None`` for nobody."""
    if not found.parts:
        return None
    ids: list[tuple[str, int, str, str]] = []
    frames: list[DataFrame] = []
    for rank, (rows, reason) in enumerate(found.parts):
        if isinstance(rows, tuple):
            ids += [(each, rank, "failed", reason) for each in rows]
            continue
        column = F.lit(reason) if isinstance(reason, str) else reason
        frames.append(
            rows.select(
                F.col("message_id").cast("string").alias("message_id"),
                F.lit(rank).alias("rank"),
                F.lit("failed").alias("status"),
                _cut(column).alias("reason"),
            )
        )
    if not frames:
        return ids or None
    if ids:
        frames.append(spark.createDataFrame(ids, _NAMED))
    named = frames[0]
    for each in frames[1:]:
        named = named.unionByName(each)
    return named


def _named_of_outcomes(found: Outcomes) -> DataFrame:
    """What a DataFrame of outcomes named."""
    status = F.lower(F.col(found.status).cast("string"))
    word = F.when(status == "true", "ok").when(status == "false", "failed").otherwise(status)
    good, bad = word.isin(*OK_STATUS), word.isin(*FAILED_STATUS)
    made: DataFrame = found.frame.select(
        F.col("message_id").cast("string").alias("message_id"),
        # A message named twice failed if either says so; a word that is none is reported.
        F.when(good, 0).when(bad, 1).otherwise(2).alias("rank"),
        F.when(good, "ok")
        .when(bad, "failed")
        .otherwise(F.coalesce(F.col(found.status).cast("string"), F.lit("null")))
        .alias("status"),
        (_cut(F.col("reason")) if found.reasons else F.lit(None).cast("string")).alias("reason"),
    )
    return made


def _cut(column: Any) -> Any:
    return F.substring(column.cast("string"), 1, MAX_REASON)


def _from_few(rows: DataFrame, named: list[Any], *, complete: bool) -> Iterator[_Exception]:
    """The exceptions when few messages were named: look their rows up by id.

    :param complete: Whether a message that was not named has no outcome.
    """
    found: dict[str, Any] = {}
    for each in named:
        message_id, rank, *_ = each
        if message_id not in found or rank >= found[message_id][1]:
            found[message_id] = each
    for _, rank, status, _ in found.values():
        _check_word(rank, status)
    good = [message_id for message_id, each in found.items() if each[2] == "ok"]
    wanted = rows
    if not complete:
        if not found:
            return
        wanted = rows.where(F.col("message_id").isin([i for i in found if i is not None]))
    seen = set()
    held = set(good)
    for row in wanted.toLocalIterator():
        message_id = row["message_id"]
        seen.add(message_id)
        if message_id in held:
            continue
        each = found.get(message_id)
        yield _Exception(row, _MISSING if each is None else _failed(each[3]))
    _check_known([message_id for message_id in found if message_id not in seen])


def _from_join(
    rows: DataFrame, named: DataFrame, batch: PlannedBatch, *, complete: bool
) -> Iterator[_Exception]:
    """The same by a join, whatever the number."""
    best = named.groupBy("message_id").agg(
        F.max(F.struct("rank", "status", "reason")).alias("_named")
    )
    # Never by a broadcast: Spark goes by compressed sizes, and ids compress well; what has a
    # megabyte to be sent has hundreds in a driver that builds a table of them.
    joined = best.hint("merge").join(
        rows.withColumn("_here", F.lit(True)), "message_id", "full" if complete else "left"
    )
    status = F.col("_named.status")
    wanted = joined.where(F.col("_here").isNull() | status.isNull() | (status != "ok"))
    unknown: list[str] = []
    for row in _in_parts(wanted, batch).toLocalIterator():
        named_row = row["_named"]
        if not row["_here"]:
            unknown.append(row["message_id"])
            if len(unknown) > SHOWN:
                break
            continue
        if named_row is None:
            yield _Exception(row, _MISSING)
            continue
        _check_word(named_row["rank"] if complete else 0, named_row["status"])
        yield _Exception(row, _failed(named_row["reason"]))
    _check_known(unknown)


def _failed(reason: str | None) -> Status:
    return Status("failed", reason or "failed by handle_batch")


def _check_word(rank: int, status: str) -> None:
    if rank >= 2 and status not in ("ok", "failed"):
        raise PipelineError(
            f"the DataFrame that handle_batch returned has the status {status!r}; expected one of"
            f" {sorted(OK_STATUS)} or {sorted(FAILED_STATUS)}, or true and false"
        )


def _check_known(unknown: list[str]) -> None:
    # Passing over them could ack what was meant to fail: a column of other ids is easily taken.
    if unknown:
        shown = ", ".join(repr(message_id) for message_id in unknown[:SHOWN])
        more = " and more" if len(unknown) > SHOWN else ""
        raise PipelineError(
            f"handle_batch returned message ids that are not of this batch: {shown}{more}; take the"
            " column message_id of `messages`"
        )


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
    """Which generation a row is of, where its batch does not tell."""
    return int(row["source"]) if len(batch.sources) > 1 else None


def _line(
    message_id: str, attempt: int, data: Delivery, verdict: Verdict, source: int | None
) -> EntryLine:
    # With its body in any case: some brokers give back, too, by publishing again.
    entry = Entry(message_id, data.receipt, verdict, attempt, data.payload, data.properties)
    return EntryLine(entry, source, settled=False)


def _delivery(message: Message) -> Delivery:
    data = message.acknowledger.data
    return data if isinstance(data, Delivery) else Delivery()


def _batch_key(text: str | None, batch: PlannedBatch) -> Any:
    """A message's key: its batch's; of a batch of several keys the text that its row has."""
    if batch.batch_key is not None:
        return plain_key(batch.batch_key)
    return None if text == "null" else text


def as_utc(value: int) -> datetime:
    """Microseconds since 1970 as an instant, aware UTC."""
    return _EPOCH + timedelta(microseconds=value)


def to_python(value: Any, kind: DataType | Schema) -> Any:
    """A value that Spark collected in plain Python: dicts, lists, ``bytes``, aware UTC instants.

    :param value: With its instants as :func:`frame.micros` left them.
    """
    if value is None:
        return None
    if isinstance(kind, Struct):
        return {field.name: to_python(value[i], field.type) for i, field in enumerate(kind.fields)}
    if isinstance(kind, Array):
        return [to_python(each, kind.element) for each in value]
    if isinstance(kind, Map):
        items = value.items() if isinstance(value, Mapping) else value
        return {to_python(k, kind.key): to_python(v, kind.value) for k, v in items}
    if kind is Atomic.BINARY:
        return bytes(value)
    if kind is Atomic.TIMESTAMP:
        return as_utc(value)
    return value
