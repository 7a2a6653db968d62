"""``airflow-broadway depth``: how full the queues of pipelines are, and how old the oldest message.

No message is received.  All brokers are asked concurrently: a silent one does not delay the others.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from airflow_broadway.adapters.backlog import look_at
from airflow_broadway.cli.opening import connected, pipeline_of
from airflow_broadway.cli.output import one_line, say, say_json
from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import table
from airflow_broadway.runs.backlog.queues import WatchedQueues

T = TypeVar("T")

#: What is known where the broker itself does not say.
_SILENT: Final = "the broker does not say how full the queue is"


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

    def ask(self, look: Callable[[], QueueDepth | None]) -> None:
        """Read the depth; a failure is this pipeline's alone."""
        self.depth = self.guarded(look)
        if self.depth is None:
            self.unknown = self.unknown or _SILENT
        self.done.set()

    def guarded(self, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``; ``None`` and a reason in :attr:`unknown` if it fails."""
        try:
            return call()
        except (BroadwayError, OSError) as error:
            self.unknown = redacted(one_line(error))
        except (Exception, SystemExit) as error:
            # Users' code raised it: its text may say anything.
            self.unknown = f"{type(error).__name__} was raised; a worker's log may say more"
        return None

    @staticmethod
    def wait(queries: Sequence[DepthQuery], seconds: float, clock: Clock) -> None:
        """Wait for the results of all queries, for so many seconds in all."""
        end = clock.monotonic() + seconds
        for query in queries:
            if not query.done.wait(max(0.0, end - clock.monotonic())):
                query.unknown = f"the broker did not answer within {seconds:g} s"


def depth(given: argparse.Namespace) -> int:
    """Print the depth of each pipeline's queues; return 1 if one of them is unknown."""
    queries = [DepthQuery(reference) for reference in given.pipeline]
    for query in queries:
        # One after another, in the main thread: users' modules are loaded here.
        look = query.guarded(partial(_prepare, query, given))
        if look is None:
            query.done.set()
            continue
        threading.Thread(target=query.ask, args=(look,), daemon=True).start()
    DepthQuery.wait(queries, given.timeout, SystemClock())
    results = [query.to_json() for query in queries]
    if given.json:
        say_json(results)
    else:
        _print(results)
    return int(any(result["unknown"] for result in results))


def _prepare(query: DepthQuery, given: argparse.Namespace) -> Callable[[], QueueDepth | None]:
    """Load a pipeline, and return a function that reads the depth of its queues."""
    pipeline = pipeline_of(query.reference)
    query.pipeline = pipeline.name
    query.broker = pipeline.producer.kind or type(pipeline.producer).__name__
    producer = connected(pipeline.producer, query.reference, given.conn_id)
    queues = WatchedQueues(pipeline.name, producer.shards())
    return lambda: look_at(queues, given.staging)


def _print(found: list[dict[str, Any]]) -> None:
    rows = [
        (
            each["pipeline"] or each["reference"],
            each["broker"],
            *(each[name] for name in ("ready", "delayed", "leased", "dead")),
            None if each["oldest_age"] is None else round(each["oldest_age"]),
        )
        for each in found
    ]
    heads = ("pipeline", "broker", "ready", "delayed", "leased", "dead", "oldest (s)")
    say(*table(heads, rows))
    for each in found:
        if each["unknown"]:
            say(f"{each['pipeline'] or each['reference']} is not known: {each['unknown']}")
