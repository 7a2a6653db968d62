"""The pipelines of the crash campaigns; each covers a different feature.

The body of a message is its number, which determines its outcome.  No pipeline has processors in
other processes: these would import the pipeline without the case's producer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from airflow_broadway import (
    Archive,
    Batcher,
    BatchInfo,
    Broadway,
    Interval,
    Message,
    Processors,
    RetryPolicy,
    Rows,
)
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.sinks import DeltaTable, IcebergTable, ParquetFolder, PostgresTable
from airflow_broadway.spark import failed
from airflow_broadway.testing.crashes.campaign import Family
from tests.crashes.sinks import Delta, DeltaByTime, Folder, Iceberg, Postgres, SinkUnderTest

#: A time within the interval of backfills.
_NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)
_PRODUCER = SqliteProducer(queue="crashes", path="/given", retry=RetryPolicy(max_attempts=2))


class CrashPipeline(Broadway):
    """A pipeline with attributes for its subject and its campaign."""

    #: Seconds for which the ack sensor holds the messages of failed tasks.
    hold_failed: ClassVar[float] = 0.0
    #: Whether a run is one task, as with BroadwayRunOperator.
    unstaged: ClassVar[bool] = False
    #: The families of its cases.
    families: ClassVar[Sequence[Family]] = tuple(Family)


class Batches(CrashPipeline):
    """One batcher; in each stage some messages fail twice and are dead-lettered."""

    producer = _PRODUCER
    processors = Processors(concurrency=1, max_demand=4)
    batchers = {"default": Batcher(engine="python", batch_size=4, batch_timeout=None)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = message.put_data(int(message.data))
        return message.failed("seven") if message.data % 7 == 3 else message

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        return [
            message.failed("five") if message.data % 5 == 2 else message for message in messages
        ]


class TwoBatchers(Batches):
    """Two batchers, one of them with keys, and two producers."""

    producer = SqliteProducer(
        queue="crashes", path="/given", retry=RetryPolicy(max_attempts=1), concurrency=2
    )
    batchers = {
        "even": Batcher(engine="python", batch_size=3, batch_timeout=None),
        "odd": Batcher(engine="python", batch_size=2, batch_timeout=None),
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = super().handle_message(processor, message, context)
        if message.data % 2 == 0:
            return message.put_batcher("even")
        return message.put_batcher("odd").put_batch_key(str(message.data % 3))


class OnSpark(Batches):
    """One batcher, on Spark."""

    batchers = {"default": Batcher(engine="spark", batch_size=6, batch_timeout=None)}

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        return failed(messages.where("int(data) % 5 = 2"), reason="five")


class Mixed(Batches):
    """Two batchers: one on Spark, one in Python."""

    batchers = {
        "big": Batcher(engine="spark", batch_size=4, batch_timeout=None),
        "small": Batcher(engine="python", batch_size=3, batch_timeout=None),
    }

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = super().handle_message(processor, message, context)
        return message.put_batcher("small" if message.data % 2 else "big")

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        if batcher == "big":
            return failed(messages.where("int(data) % 5 = 2"), reason="five")
        return super().handle_batch(batcher, messages, batch_info, context)


class NoBatchers(CrashPipeline):
    """Only processors: their result is the outcome."""

    producer = _PRODUCER
    processors = Processors(concurrency=1, max_demand=4)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("seven") if int(message.data) % 7 == 3 else message


class Retries(Batches):
    """Some messages fail once and are retried after a delay, some fail at every attempt."""

    producer = SqliteProducer(
        queue="crashes", path="/given", retry=RetryPolicy(max_attempts=3, backoff=30.0)
    )

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = message.put_data(int(message.data))
        return message.failed("once") if message.data % 4 == 1 and message.attempt == 1 else message


class AcksImmediately(Batches):
    """Some messages are settled within ``handle_message``, successes and failures."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = super().handle_message(processor, message, context)
        if message.data % 4 == 1 or message.data % 7 == 3:
            return message.ack_immediately()
        return message


class HoldsFailed(Batches):
    """The sensor holds the messages of failed tasks until these are cleared, or a timeout."""

    hold_failed = 600.0


class Archives(Batches):
    """Archives received messages once they are settled."""

    archive = Archive()


class OneTask(Batches):
    """A run is one task without staging; a failed message is dead-lettered immediately."""

    producer = SqliteProducer(queue="crashes", path="/given", retry=RetryPolicy(max_attempts=1))
    unstaged = True


class Commits(Batches):
    """Commits each number to a folder of Parquet files exactly once.

    Rows have a letter before the number, because message ids of Pub/Sub's stub are numbers, too.
    """

    batchers = {
        "default": Batcher(
            engine="python", batch_size=4, batch_timeout=None, sink=ParquetFolder(path="/given")
        )
    }
    sink_class: ClassVar[type[SinkUnderTest]] = Folder

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        failed = [message.failed("five") for message in messages if message.data % 5 == 2]
        return Rows([{"number": f"n{m.data}"} for m in messages if m.data % 5 != 2], failed=failed)


class CommitsToDelta(Commits):
    batchers = {"default": replace(Commits.batchers["default"], sink=DeltaTable(path="/given"))}
    sink_class = Delta


class CommitsToIceberg(Commits):
    batchers = {"default": replace(Commits.batchers["default"], sink=IcebergTable(table="a.b"))}
    sink_class = Iceberg


class CommitsToPostgres(Commits):
    batchers = {"default": replace(Commits.batchers["default"], sink=PostgresTable(table="a.b"))}
    sink_class = Postgres


class CommitsOnSpark(Commits):
    """Commits from the Spark driver."""

    batchers = {
        "default": Batcher(
            engine="spark", batch_size=6, batch_timeout=None, sink=ParquetFolder(path="/given")
        )
    }

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        rows = messages.where("int(data) % 5 != 2").selectExpr("concat('n', data) AS number")
        return Rows(rows, failed=failed(messages.where("int(data) % 5 = 2"), reason="five"))


class Refills(Batches):
    """Writes each batch to a file; a backfill removes all files first.

    Without zombies: one that resumes within ``prepare_backfill`` would remove new files.
    """

    families = (Family.CRASHES, Family.FAULTS)

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        Path("rows").mkdir(exist_ok=True)
        rows = [message.data for message in messages]
        name = f"{self.run.source.kind}-{batch_info.batch_id}"
        Path(f"rows/{name}").write_text(json.dumps(rows))
        return super().handle_batch(batcher, messages, batch_info, context)

    def prepare_backfill(self, interval: Interval, context: Any) -> None:
        for path in sorted(Path().glob("rows/*")):
            path.unlink()


class ReplacesInDelta(CommitsToDelta):
    """Deletes the interval's rows before a backfill, at most once per run.

    A failed commit fails its batch, without a second attempt.
    """

    families = (Family.CRASHES, Family.PAIRS, Family.ZOMBIES)

    batchers = {
        "default": replace(
            Commits.batchers["default"], sink=DeltaTable(path="/given", time_column="at")
        )
    }
    sink_class = DeltaByTime

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        result = super().handle_batch(batcher, messages, batch_info, context)
        return Rows([{**row, "at": _NOON} for row in result.rows], failed=result.failed)


PIPELINES: dict[str, type[CrashPipeline]] = {
    "batches": Batches,
    "two batchers": TwoBatchers,
    "no batchers": NoBatchers,
    "retries": Retries,
    "acks immediately": AcksImmediately,
    "holds failed": HoldsFailed,
    "archives": Archives,
    "one task": OneTask,
    "commits": Commits,
    "commits to delta": CommitsToDelta,
    "commits to iceberg": CommitsToIceberg,
    "commits to postgres": CommitsToPostgres,
    "commits on spark": CommitsOnSpark,
    "refills": Refills,
    "replaces in delta": ReplacesInDelta,
    "on spark": OnSpark,
    "mixed": Mixed,
}
