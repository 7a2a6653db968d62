"""Finds the messages of a batch that did not succeed, by the result of ``handle_batch``.

Only their rows are collected into the driver, one small partition at a time, so that a batch of
millions can fail in a driver with little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as F  # noqa: N812

from airflow_broadway.core.custody.verdicts import MAX_REASON
from airflow_broadway.core.errors import PipelineError
from airflow_broadway.core.formats.plan import PlannedBatch
from airflow_broadway.core.model.message import Status
from airflow_broadway.spark.frame import BatchFrames
from airflow_broadway.spark.results import FAILED_STATUS, OK_STATUS, Failed, Outcomes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The maximum number of named messages that are looked up by their ids; more are joined.
SMALL = 1000
#: Approximate rows and bytes per collected partition: the driver holds one at a time.
PART_ROWS, PART_BYTES = 10_000, 8 * 1024 * 1024
#: Ids named in an error.
SHOWN = 3

#: The status of a message that ``handle_batch`` did not return.
MISSING = Status("missing")


class Unsuccessful(NamedTuple):
    """A message that did not succeed: its row and its status."""

    row: Any
    status: Status


def unsuccessful(
    spark: SparkSession,
    frames: BatchFrames,
    batch: PlannedBatch,
    result: Failed | Outcomes | Status | None,
    *,
    data: bool,
) -> Iterator[Unsuccessful]:
    """Streams the messages of a batch that did not succeed.

    :param result: The result of :func:`results.read`, or the status of the whole batch.
    :param data: Whether to include the columns for ``handle_failed``.
    :raises PipelineError: If the result of ``handle_batch`` names messages that are not of the
        batch, or has an unknown status.
    """
    if result is None:
        return iter(())
    rows = frames.private(spark, batch, data=data)
    if isinstance(result, Status):
        return (Unsuccessful(row, result) for row in _repartition(rows, batch).toLocalIterator())
    if isinstance(result, Failed):
        named = _named_of_failed(spark, result)
        if named is None:
            return iter(())
        few: list[Any] | None = (
            named if isinstance(named, list) else named.limit(SMALL + 1).collect()
        )
    else:
        named = _named_of_outcomes(result)
        few = named.limit(SMALL + 1).collect() if batch.size <= SMALL else None
    complete = isinstance(result, Outcomes)
    if few is not None and len(few) <= SMALL:
        return _from_few(rows, few, complete=complete)
    if isinstance(named, list):
        named = spark.createDataFrame(named, _NAMED)
    return _from_join(rows, named, batch, complete=complete)


def _repartition(rows: DataFrame, batch: PlannedBatch) -> DataFrame:
    """Repartitions rows so that a partition fits into a driver with little memory."""
    parts = max(-(-batch.size // PART_ROWS), -(-batch.bytes // PART_BYTES))
    return rows if parts <= 1 else rows.repartition(parts, "message_id")


#: A row for each named message; of several for one message the highest rank counts.
_NAMED = "message_id string, rank int, status string, reason string"


def _named_of_failed(
    spark: SparkSession, result: Failed
) -> list[tuple[str, int, str, str]] | DataFrame | None:
    """Returns the messages named by ``failed()``: a list of rows of ``_NAMED``, a DataFrame, or
    ``None``.

    The rank is the position of the ``failed()``: of several reasons for a message the last counts.
    """
    if not result.parts:
        return None
    ids: list[tuple[str, int, str, str]] = []
    frames: list[DataFrame] = []
    for rank, (rows, reason) in enumerate(result.parts):
        if isinstance(rows, tuple):
            ids += [(message_id, rank, "failed", reason) for message_id in rows]
            continue
        column = F.lit(reason) if isinstance(reason, str) else reason
        frames.append(
            rows.select(
                F.col("message_id").cast("string").alias("message_id"),
                F.lit(rank).alias("rank"),
                F.lit("failed").alias("status"),
                _truncate(column).alias("reason"),
            )
        )
    if not frames:
        return ids or None
    if ids:
        frames.append(spark.createDataFrame(ids, _NAMED))
    named = frames[0]
    for frame in frames[1:]:
        named = named.unionByName(frame)
    return named


def _named_of_outcomes(result: Outcomes) -> DataFrame:
    """Returns a DataFrame of outcomes as rows of ``_NAMED``."""
    status = F.lower(F.col(result.status).cast("string"))
    word = F.when(status == "true", "ok").when(status == "false", "failed").otherwise(status)
    good, bad = word.isin(*OK_STATUS), word.isin(*FAILED_STATUS)
    rows: DataFrame = result.frame.select(
        F.col("message_id").cast("string").alias("message_id"),
        # A message named twice failed if either row failed; an unknown word raises later.
        F.when(good, 0).when(bad, 1).otherwise(2).alias("rank"),
        F.when(good, "ok")
        .when(bad, "failed")
        .otherwise(F.coalesce(F.col(result.status).cast("string"), F.lit("null")))
        .alias("status"),
        (_truncate(F.col("reason")) if result.reasons else F.lit(None).cast("string")).alias(
            "reason"
        ),
    )
    return rows


def _truncate(column: Any) -> Any:
    return F.substring(column.cast("string"), 1, MAX_REASON)


def _from_few(rows: DataFrame, named: list[Any], *, complete: bool) -> Iterator[Unsuccessful]:
    """Looks up the rows of a few named messages by their ids.

    :param complete: Whether a message that is not named has no outcome; if not, it succeeded.
    """
    named_by_id: dict[str, Any] = {}
    for named_row in named:
        message_id, rank, *_ = named_row
        if message_id not in named_by_id or rank >= named_by_id[message_id][1]:
            named_by_id[message_id] = named_row
    for _, _, status, _ in named_by_id.values():
        _check_status(status)
    wanted = rows
    if not complete:
        if not named_by_id:
            return
        wanted = rows.where(F.col("message_id").isin([i for i in named_by_id if i is not None]))
    seen = set()
    for row in wanted.toLocalIterator():
        message_id = row["message_id"]
        seen.add(message_id)
        named_row = named_by_id.get(message_id)
        if named_row is None:
            yield Unsuccessful(row, MISSING)
        elif named_row[2] != "ok":
            yield Unsuccessful(row, _failed_status(named_row[3]))
    _check_known([message_id for message_id in named_by_id if message_id not in seen])


def _from_join(
    rows: DataFrame, named: DataFrame, batch: PlannedBatch, *, complete: bool
) -> Iterator[Unsuccessful]:
    """Looks up the rows of any number of named messages by a join."""
    best = named.groupBy("message_id").agg(
        F.max(F.struct("rank", "status", "reason")).alias("_named")
    )
    # Never a broadcast join: Spark decides by compressed sizes, and ids compress well: a compressed
    # megabyte may become a table of hundreds in the driver.
    joined = best.hint("merge").join(
        rows.withColumn("_here", F.lit(True)), "message_id", "full" if complete else "left"
    )
    status = F.col("_named.status")
    wanted = joined.where(F.col("_here").isNull() | status.isNull() | (status != "ok"))
    unknown: list[str] = []
    for row in _repartition(wanted, batch).toLocalIterator():
        named_row = row["_named"]
        if not row["_here"]:
            unknown.append(row["message_id"])
            if len(unknown) > SHOWN:
                break
            continue
        if named_row is None:
            yield Unsuccessful(row, MISSING)
            continue
        _check_status(named_row["status"])
        yield Unsuccessful(row, _failed_status(named_row["reason"]))
    _check_known(unknown)


def _failed_status(reason: str | None) -> Status:
    return Status("failed", reason or "failed by handle_batch")


def _check_status(status: str) -> None:
    if status not in ("ok", "failed"):
        raise PipelineError(
            f"the DataFrame that handle_batch returned has the status {status!r}; expected one of"
            f" {sorted(OK_STATUS)} or {sorted(FAILED_STATUS)}, or true and false"
        )


def _check_known(unknown: list[str]) -> None:
    # Ignoring them could ack messages that should have failed, if a wrong column was used.
    if unknown:
        some = ", ".join(repr(message_id) for message_id in unknown[:SHOWN])
        more = " and more" if len(unknown) > SHOWN else ""
        raise PipelineError(
            f"handle_batch returned message ids that are not of this batch: {some}{more}; take the"
            " column message_id of `messages`"
        )
