"""``airflow-broadway depth``: reports queue depths and the age of the oldest message.

No message is received.  All brokers are queried concurrently: a slow one does not delay the others.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from airflow_broadway.adapters.backlog import look_at
from airflow_broadway.cli.opening import connected, pipeline_of
from airflow_broadway.cli.output import Result
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import printable, table
from airflow_broadway.runs.backlog.queues import WatchedQueues

T = TypeVar("T")

#: The reason where there is no depth.
_UNREPORTED: Final = "the broker does not report the depth, or this host has no such queue"


@dataclass(slots=True)
class DepthQuery:
    """A query for the depth of a pipeline's queues, and its result.

    :param unknown: Why the depth is unknown; empty if it is known.
    """

    reference: str
    pipeline: str | None = None
    broker: str | None = None
    depth: QueueDepth | None = None
    unknown: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def to_json(self) -> dict[str, Any]:
        depth = None if self.unknown else self.depth
        counts = dict.fromkeys(QueueDepth._fields) if depth is None else depth._asdict()
        return {
            "reference": self.reference,
            "pipeline": self.pipeline,
            "broker": self.broker,
            **counts,
            "unknown": self.unknown,
        }

    def run(self, look: Callable[[], QueueDepth | None]) -> None:
        """Reads the depth; a failure affects this pipeline only."""
        self.depth = self.guarded(look)
        if self.depth is None:
            self.unknown = self.unknown or _UNREPORTED
        self.done.set()

    def guarded(self, call: Callable[[], T]) -> T | None:
        """Returns the result of ``call``; ``None`` and a reason in :attr:`unknown` if it fails."""
        try:
            return call()
        except (BroadwayError, OSError) as error:
            self.unknown = redacted(printable(error))
        except (Exception, SystemExit) as error:
            # Raised by user code: its text may contain secrets.
            self.unknown = f"{type(error).__name__} was raised; a worker's log may have more"
        return None

    @staticmethod
    def wait(queries: Sequence[DepthQuery], seconds: float, clock: Clock) -> None:
        """Waits for the results of all queries, for ``seconds`` in total."""
        end = clock.monotonic() + seconds
        for query in queries:
            if not query.done.wait(max(0.0, end - clock.monotonic())):
                query.unknown = f"the broker did not answer within {seconds:g} s"


def depth(args: argparse.Namespace) -> Result:
    """Reports the depth of each pipeline's queues; the exit code is 1 if a depth is unknown."""
    queries = [DepthQuery(reference) for reference in args.pipeline]
    for query in queries:
        # Sequentially, in the main thread: user modules are imported here.
        look = query.guarded(partial(_prepare, query, args))
        if look is None:
            query.done.set()
            continue
        threading.Thread(target=query.run, args=(look,), daemon=True).start()
    DepthQuery.wait(queries, args.timeout, SystemClock())
    results = [query.to_json() for query in queries]
    return Result(results, _format_depths(results), int(any(r["unknown"] for r in results)))


def _prepare(query: DepthQuery, args: argparse.Namespace) -> Callable[[], QueueDepth | None]:
    """Loads a pipeline, and returns a function that reads the depth of its queues."""
    pipeline = pipeline_of(query.reference)
    query.pipeline = pipeline.name
    query.broker = pipeline.producer.kind or type(pipeline.producer).__name__
    producer = connected(pipeline.producer, query.reference, args.conn_id)
    queues = WatchedQueues(pipeline.name, producer.shards())
    return lambda: look_at(queues, args.staging)


def _format_depths(results: list[dict[str, Any]]) -> Iterator[str]:
    counts = ("ready", "delayed", "leased", "dead")
    names = [row["pipeline"] or row["reference"] for row in results]
    ages = [None if row["oldest_age"] is None else round(row["oldest_age"]) for row in results]
    yield from table(
        ("pipeline", "broker", *counts, "oldest (s)"),
        [
            (name, row["broker"], *(row[count] for count in counts), age)
            for name, row, age in zip(names, results, ages, strict=True)
        ],
    )
    for name, row in zip(names, results, strict=True):
        if row["unknown"]:
            yield f"The depth of {name} is not known: {row['unknown']}"
