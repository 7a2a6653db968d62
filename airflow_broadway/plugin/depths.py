"""The depth of pipelines' queues: as runs, triggers and sensors reported it, or, where ``[broadway]
ask_brokers`` is on, as the broker answers now.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.errors import StagingError
from airflow_broadway.plugin.children import CHILDREN, ChildError, Children
from airflow_broadway.runs.backlog.reports import BacklogReport, PipelineKey

#: Seconds for which an answer counts, and how many are remembered.
REMEMBERED: Final = 60.0
MOST_REMEMBERED: Final = 2_000
#: Seconds in which brokers are to answer.
_TIMEOUT: Final = 15.0

#: The last report of a pipeline, why it cannot be read, or ``None``: there is none.
Reported = BacklogReport | StagingError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How much waits, as :class:`.QueueDepth` says.

    :param unknown: Why nothing is known; the counts are then ``None``.
    :param at: When that was so.
    :param by: The task, trigger or sensor that reported it; empty if the API server has asked.
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
    """A depth as it was reported; ``None`` if it was not."""
    if reported is None:
        return None
    if isinstance(reported, StagingError):
        return Depth(unknown=str(reported), at=now)
    if reported.depth is None:
        unknown = "the broker does not report the depth of the queue"
        return Depth(unknown=unknown, at=reported.at, by=reported.by)
    return Depth(**reported.depth._asdict(), at=reported.at, by=reported.by)


class Depths:
    """Asks for depths, and remembers them for a while; used from one event loop."""

    def __init__(self, children: Children, clock: Clock | None = None) -> None:
        self._children = children
        self._clock = clock or SystemClock()
        self._known: dict[tuple[str | None, PipelineKey], Depth] = {}

    def recall(self, staging: str | None, key: PipelineKey) -> Depth | None:
        """What a broker answered lately."""
        depth = self._known.get((staging, key))
        if depth is None or self._clock.now() - depth.at > timedelta(seconds=REMEMBERED):
            return None
        return depth

    async def ask(self, wanted: Sequence[tuple[str | None, PipelineKey, Reported]]) -> None:
        """Ask for those whose producers' options were reported, all in one process: to start one
        costs seconds.
        """
        asked: dict[str, tuple[str | None, PipelineKey]] = {}
        queues: list[Mapping[str, str | None]] = []
        now = self._clock.now()
        for number, (staging, key, reported) in enumerate(wanted):
            if not isinstance(reported, BacklogReport) or not reported.queues:
                continue  # what was reported stands
            asked[str(number)] = (staging, key)
            queues.append({"key": str(number), "queues": reported.queues, "staging": staging})
        if not queues:
            return
        try:
            answer = await self._children.ask(
                {"ask": "depth", "seconds": _TIMEOUT, "queues": queues}
            )
        except ChildError as error:
            self._known |= dict.fromkeys(asked.values(), Depth(unknown=str(error), at=now))
        else:
            for each in answer.value:
                found = {name: each[name] for name in _FIELDS}
                self._known[asked[each["reference"]]] = Depth(**found, at=answer.at)
        while len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]


_FIELDS: Final = ("ready", "delayed", "leased", "dead", "oldest_age", "unknown")

#: Those of this process of the API server.
DEPTHS: Final = Depths(CHILDREN)
