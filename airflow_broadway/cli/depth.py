"""``airflow-broadway depth``: how full the queues of pipelines are, and how old the oldest message.

Nothing is taken, whatever the broker.  Pipelines are asked at the same time, since one broker that
keeps silent must not hide what the others say; and several in one process, since to start one takes
longer than to ask a broker.
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

__all__ = ["DepthQuery", "depth"]

T = TypeVar("T")

#: What is known where the broker itself does not say.
_SILENT: Final = "the broker does not say how full the queue is"


@dataclass(slots=True)
class DepthQuery:
    """A pipeline, and what is known of its queues.

    :param unknown: Why nothing is known; empty if it is.
    """

    reference: str
    pipeline: str | None = None
    broker: str | None = None
    found: QueueDepth | None = None
    unknown: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def to_json(self) -> dict[str, Any]:
        found = None if self.unknown else self.found
        counts = dict.fromkeys(QueueDepth._fields) if found is None else found._asdict()
        return {
            "reference": self.reference,
            "pipeline": self.pipeline,
            "broker": self.broker,
            **counts,
            "unknown": self.unknown,
        }

    def ask(self, look: Callable[[], QueueDepth | None]) -> None:
        """Read the depth; a failure is this pipeline's alone."""
        found = self.guarded(look)
        if found is None:
            self.unknown = self.unknown or _SILENT
        self.found = found
        self.done.set()

    def guarded(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns; ``None`` if it fails, which :attr:`unknown` then says."""
        try:
            return call()
        except (BroadwayError, OSError) as error:
            self.unknown = redacted(one_line(error))
        except (Exception, SystemExit) as error:
            # Users' code raised it: its text may say anything.
            self.unknown = f"{type(error).__name__} was raised; a worker's log may say more"
        return None

    @staticmethod
    def wait(asked: Sequence[DepthQuery], seconds: float, clock: Clock) -> None:
        """Wait for all, together no longer than that."""
        end = clock.monotonic() + seconds
        for each in asked:
            if not each.done.wait(max(0.0, end - clock.monotonic())):
                each.unknown = f"the broker did not answer within {seconds:g} s"


def depth(given: argparse.Namespace) -> int:
    """Ask for all; 1 if something of one of them is not known."""
    asked = [DepthQuery(reference) for reference in given.pipeline]
    for each in asked:
        # One after another, in the main thread: users' modules are loaded here.
        look = each.guarded(partial(_prepare, each, given))
        if look is None:
            each.done.set()
            continue
        threading.Thread(target=each.ask, args=(look,), daemon=True).start()
    DepthQuery.wait(asked, given.timeout, SystemClock())
    found = [each.to_json() for each in asked]
    if given.json:
        say_json(found)
    else:
        _print(found)
    return int(any(each["unknown"] for each in found))


def _prepare(asked: DepthQuery, given: argparse.Namespace) -> Callable[[], QueueDepth | None]:
    """What asks for a pipeline's backlog."""
    pipeline = pipeline_of(asked.reference)
    asked.pipeline = pipeline.name
    asked.broker = pipeline.producer.kind or type(pipeline.producer).__name__
    producer = connected(pipeline.producer, asked.reference, given.conn_id)
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
