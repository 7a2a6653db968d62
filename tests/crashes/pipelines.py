"""The pipelines whose every point is struck: small, and each with something of its own.

The body of a message is its number.  What becomes of it is told by the number alone.
None has its processors in other processes: those import the pipeline anew by its options, of which
a producer that is made for the case is none, and start Python for each execution.
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
from tests.crashes.subjects_sinks import Delta, DeltaByTime, Folder, Iceberg, Place, Postgres

#: In the interval of backfills.
_NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)
_PRODUCER = SqliteProducer(queue="crashes", path="/given", retry=RetryPolicy(max_attempts=2))


class Struck(Broadway):
    """A pipeline, and how its runs are set up."""

    #: Seconds for which the ack sensor holds what failed tasks received.
    hold_failed: ClassVar[float] = 0.0
    #: Whether a run is one task, as BroadwayRunOperator's.
    unstaged: ClassVar[bool] = False
    #: How it is struck.
    families: ClassVar[Sequence[Family]] = tuple(Family)


class Batches(Struck):
    """One batcher; some messages fail in each stage, and die at their second attempt."""

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
    """Two batchers: one on Spark, one of Python."""

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


class NoBatchers(Struck):
    """Processors only: what they return is the outcome."""

    producer = _PRODUCER
    processors = Processors(concurrency=1, max_demand=4)

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.failed("seven") if int(message.data) % 7 == 3 else message


class Retries(Batches):
    """Some messages fail once and come again later, some fail for good."""

    producer = SqliteProducer(
        queue="crashes", path="/given", retry=RetryPolicy(max_attempts=3, backoff=30.0)
    )

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = message.put_data(int(message.data))
        return message.failed("once") if message.data % 4 == 1 and message.attempt == 1 else message


class AtOnce(Batches):
    """Some messages are settled within ``handle_message``, successes and failures."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        message = super().handle_message(processor, message, context)
        if message.data % 4 == 1 or message.data % 7 == 3:
            return message.ack_immediately()
        return message


class HoldsFailed(Batches):
    """The sensor holds what failed tasks received, until they are cleared or the time is over."""

    hold_failed = 600.0


class Archives(Batches):
    """Archives received messages once they are settled."""

    archive = Archive()


class OneTask(Batches):
    """A run is one task, and stages nothing; what fails is a dead letter at once."""

    producer = SqliteProducer(queue="crashes", path="/given", retry=RetryPolicy(max_attempts=1))
    unstaged = True


class Commits(Batches):
    """Commits the numbers of each batch to a folder of Parquet files: each exactly once.

    A number is not written as one, since ids of Pub/Sub's emulator are numbers, too.
    """

    batchers = {
        "default": Batcher(
            engine="python", batch_size=4, batch_timeout=None, sink=ParquetFolder(path="/given")
        )
    }
    place: ClassVar[type[Place]] = Folder

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        failed = [message.failed("five") for message in messages if message.data % 5 == 2]
        return Rows([{"number": f"n{m.data}"} for m in messages if m.data % 5 != 2], failed=failed)


class CommitsToDelta(Commits):
    batchers = {"default": replace(Commits.batchers["default"], sink=DeltaTable(path="/given"))}
    place = Delta


class CommitsToIceberg(Commits):
    batchers = {"default": replace(Commits.batchers["default"], sink=IcebergTable(table="a.b"))}
    place = Iceberg


class CommitsToPostgres(Commits):
    batchers = {"default": replace(Commits.batchers["default"], sink=PostgresTable(table="a.b"))}
    place = Postgres


class CommitsOnSpark(Commits):
    """The same on Spark: its driver commits."""

    batchers = {
        "default": Batcher(
            engine="spark", batch_size=6, batch_timeout=None, sink=ParquetFolder(path="/given")
        )
    }

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        rows = messages.where("int(data) % 5 != 2").selectExpr("concat('n', data) AS number")
        return Rows(rows, failed=failed(messages.where("int(data) % 5 = 2"), reason="five"))


class Refills(Batches):
    """Writes each batch into a file; before a past interval is handled again the files are removed.

    Who sleeps there, and wakes when others have filled it, empties it once more.
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
    """Before a past interval is handled again its rows are deleted, at most once by each run.

    A commit that fails is the failure of its batch, for good: there is no second attempt.
    """

    families = (Family.CRASHES, Family.PAIRS, Family.ZOMBIES)

    batchers = {
        "default": replace(
            Commits.batchers["default"], sink=DeltaTable(path="/given", time_column="at")
        )
    }
    place = DeltaByTime

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        result = super().handle_batch(batcher, messages, batch_info, context)
        return Rows([{**row, "at": _NOON} for row in result.rows], failed=result.failed)


PIPELINES: dict[str, type[Struck]] = {
    "batches": Batches,
    "two batchers": TwoBatchers,
    "no batchers": NoBatchers,
    "retries": Retries,
    "at once": AtOnce,
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
