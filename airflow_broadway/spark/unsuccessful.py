"""Which messages of a batch did not succeed: the rows that what ``handle_batch`` returned names.

Only those rows are read back into the driver, a small partition at a time.  So a batch of millions
may fail in a driver of little memory.
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

#: Up to so many named messages are looked up by their ids; more are joined.
SMALL = 1000
#: Rows, and bytes, in a partition of what is read back, about: the driver holds one at a time.
PART_ROWS, PART_BYTES = 10_000, 8 * 1024 * 1024
#: Ids named in an error.
SHOWN = 3

#: The status of a message that ``handle_batch`` said nothing of.
MISSING = Status("missing")


class Unsuccessful(NamedTuple):
    """A message that did not succeed: its row, and how it stands."""

    row: Any
    status: Status


def unsuccessful(
    spark: SparkSession,
    frames: BatchFrames,
    batch: PlannedBatch,
    found: Failed | Outcomes | Status | None,
    *,
    data: bool,
) -> Iterator[Unsuccessful]:
    """The messages of a batch that did not succeed, streamed.

    :param found: What :func:`results.read` gave, or the status that the whole batch has.
    :param data: Whether their rows carry what ``handle_failed`` sees.
    :raises PipelineError: If what ``handle_batch`` returned names messages that are not of the
        batch, or has a status that is not known.
    """
    if found is None:
        return iter(())
    rows = frames.private(spark, batch, data=data)
    if isinstance(found, Status):
        return (Unsuccessful(row, found) for row in _in_parts(rows, batch).toLocalIterator())
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
    """The same rows, in partitions so small that one fits into a driver of little memory."""
    parts = max(-(-batch.size // PART_ROWS), -(-batch.bytes // PART_BYTES))
    return rows if parts <= 1 else rows.repartition(parts, "message_id")


#: A row for each message that was named; of several for one message the highest rank counts.
_NAMED = "message_id string, rank int, status string, reason string"


def _named_of_failed(
    spark: SparkSession, found: Failed
) -> list[tuple[str, int, str, str]] | DataFrame | None:
    """Whom ``failed()`` named: a list of rows of ``_NAMED``, or a DataFrame; ``None`` for nobody.

    The rank is the place of the ``failed()``: of several reasons for a message the last counts.
    """
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
    """What a DataFrame of outcomes names, as rows of ``_NAMED``."""
    status = F.lower(F.col(found.status).cast("string"))
    word = F.when(status == "true", "ok").when(status == "false", "failed").otherwise(status)
    good, bad = word.isin(*OK_STATUS), word.isin(*FAILED_STATUS)
    made: DataFrame = found.frame.select(
        F.col("message_id").cast("string").alias("message_id"),
        # A message named twice failed if either row says so; an unknown word is an error, later.
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


def _from_few(rows: DataFrame, named: list[Any], *, complete: bool) -> Iterator[Unsuccessful]:
    """Look the rows of a few named messages up by their ids.

    :param complete: Whether a message that was not named has no outcome (else it succeeded).
    """
    found: dict[str, Any] = {}
    for each in named:
        message_id, rank, *_ = each
        if message_id not in found or rank >= found[message_id][1]:
            found[message_id] = each
    for _, _, status, _ in found.values():
        _check_status(status)
    wanted = rows
    if not complete:
        if not found:
            return
        wanted = rows.where(F.col("message_id").isin([i for i in found if i is not None]))
    seen = set()
    for row in wanted.toLocalIterator():
        message_id = row["message_id"]
        seen.add(message_id)
        each = found.get(message_id)
        if each is None:
            yield Unsuccessful(row, MISSING)
        elif each[2] != "ok":
            yield Unsuccessful(row, _failed(each[3]))
    _check_known([message_id for message_id in found if message_id not in seen])


def _from_join(
    rows: DataFrame, named: DataFrame, batch: PlannedBatch, *, complete: bool
) -> Iterator[Unsuccessful]:
    """The same by a join, however many were named."""
    best = named.groupBy("message_id").agg(
        F.max(F.struct("rank", "status", "reason")).alias("_named")
    )
    # Never by a broadcast.  Spark decides by compressed sizes, and ids compress well: of a megabyte
    # that is sent, the driver builds a table of hundreds.
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
            yield Unsuccessful(row, MISSING)
            continue
        _check_status(named_row["status"])
        yield Unsuccessful(row, _failed(named_row["reason"]))
    _check_known(unknown)


def _failed(reason: str | None) -> Status:
    return Status("failed", reason or "failed by handle_batch")


def _check_status(status: str) -> None:
    if status not in ("ok", "failed"):
        raise PipelineError(
            f"the DataFrame that handle_batch returned has the status {status!r}; expected one of"
            f" {sorted(OK_STATUS)} or {sorted(FAILED_STATUS)}, or true and false"
        )


def _check_known(unknown: list[str]) -> None:
    # To pass over them could ack what was meant to fail: a column of other ids is easily taken.
    if unknown:
        shown = ", ".join(repr(message_id) for message_id in unknown[:SHOWN])
        more = " and more" if len(unknown) > SHOWN else ""
        raise PipelineError(
            f"handle_batch returned message ids that are not of this batch: {shown}{more}; take the"
            " column message_id of `messages`"
        )
