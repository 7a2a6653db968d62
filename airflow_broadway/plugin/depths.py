"""Queue depths of pipelines: as reported by runs, triggers and sensors, or current ones from the
broker if ``[broadway] ask_brokers`` is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import StagingError
from airflow_broadway.plugin.children import CHILDREN, ChildError, Children
from airflow_broadway.runs.backlog.reports import BacklogReport, PipelineKey

#: Seconds for which answers are cached, and how many.
REMEMBERED: Final = 60.0
MOST_REMEMBERED: Final = 2_000
#: Seconds before a broker counts as unresponsive.
_TIMEOUT: Final = 15.0

#: The last report of a pipeline, the error if it cannot be read, or ``None`` without a report.
Reported = BacklogReport | StagingError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """A queue depth, with the counts of :class:`.QueueDepth`.

    :param unknown: Why the depth is unknown; the counts are then ``None``.
    :param at: The timestamp of the counts.
    :param by: The task, trigger or sensor that reported it; empty if the API server queried it.
    """

    ready: int | None = None
    delayed: int | None = None
    leased: int | None = None
    dead: int | None = None
    oldest_age: float | None = None
    unknown: str = ""
    at: datetime
    by: str = ""


def depth_of(reported: Reported, now: datetime) -> Depth | None:
    """Returns the reported depth; ``None`` without a report."""
    if reported is None:
        return None
    if isinstance(reported, StagingError):
        return Depth(unknown=str(reported), at=now)
    if reported.depth is None:
        unknown = "the broker does not report the depth of the queue"
        return Depth(unknown=unknown, at=reported.at, by=reported.by)
    return Depth(**reported.depth._asdict(), at=reported.at, by=reported.by)


class Depths:
    """Queries and caches depths; used from one event loop."""

    def __init__(self, children: Children, clock: Clock | None = None) -> None:
        self._children = children
        self._clock = clock or SystemClock()
        self._known: dict[tuple[str | None, PipelineKey], Depth] = {}

    def recall(self, staging: str | None, key: PipelineKey) -> Depth | None:
        """Returns the cached answer of a broker."""
        depth = self._known.get((staging, key))
        if depth is None or self._clock.now() - depth.at > timedelta(seconds=REMEMBERED):
            return None
        return depth

    async def ask(self, wanted: Sequence[tuple[str | None, PipelineKey, Reported]]) -> None:
        """Queries all pipelines whose producer options were reported, in one child process, because
        starting one takes seconds.
        """
        pipelines = [
            (staging, key, reported.queues)
            for staging, key, reported in wanted
            if isinstance(reported, BacklogReport) and reported.queues  # else the report stays
        ]
        if not pipelines:
            return
        queues = [
            {"key": str(number), "queues": options, "staging": staging}
            for number, (staging, _, options) in enumerate(pipelines)
        ]
        question = {"ask": "depth", "seconds": _TIMEOUT, "queues": queues}
        now = self._clock.now()
        try:
            answer = await self._children.ask(question)
        except ChildError as error:
            depths = [Depth(unknown=str(error), at=now)] * len(pipelines)
        else:
            fields = (*QueueDepth._fields, "unknown")
            rows = [{name: depth[name] for name in fields} for depth in answer.value]
            depths = [Depth(at=answer.at, **row) for row in rows]
        for (staging, key, _), depth in zip(pipelines, depths, strict=True):
            self._known[staging, key] = depth
        while len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]


#: The depths of this API server process.
DEPTHS: Final = Depths(CHILDREN)
