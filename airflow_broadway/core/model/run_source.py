"""The source of a run's messages: the live queue, or data of the past."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

#: The kinds of sources: the queue; an interval of the archive; the dead letters of the queue; an
#: interval of the broker's own log, where it keeps one; the staged batches of a past run.
LIVE: Final = "live"
ARCHIVE: Final = "archive"
DEAD_LETTERS: Final = "dead_letters"
LOG: Final = "log"
RUN: Final = "run"

KINDS: Final = (LIVE, ARCHIVE, DEAD_LETTERS, LOG, RUN)


class Interval(NamedTuple):
    """A time interval, end exclusive; both aware UTC."""

    start: datetime
    end: datetime

    def __str__(self) -> str:
        return f"{self.start.isoformat()} to {self.end.isoformat()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """The source of one run's messages.

    :param kind: One of :data:`KINDS`.
    :param interval: The interval read from an archive or a log.
    :param run_id: The past run of the same Dag whose batches are run again.
    :param only: A selection of it, where supported: JSON.
    """

    kind: str = LIVE
    interval: Interval | None = None
    run_id: str = ""
    only: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_backfill(self) -> bool:
        """Whether the run handles a past interval."""
        return self.interval is not None

    @property
    def asks_broker(self) -> bool:
        """Whether a broker holds the messages; a run of another source sends no broker requests."""
        return self.kind not in (ARCHIVE, RUN)

    @property
    def is_whole(self) -> bool:
        """Whether all of it is read, regardless of budgets."""
        return self.kind in (ARCHIVE, LOG, RUN)

    def rewrites_rows_of(self, other: RunSource) -> bool:
        """Whether one of two runs replaces rows of a past interval that the other writes, too.

        A past run may have messages of any interval.
        """
        if self.interval is None or other.interval is None:
            return self.is_whole and other.is_whole and self.kind != other.kind
        return self.interval.start < other.interval.end and other.interval.start < self.interval.end

    @property
    def goes_on(self) -> bool:
        """Whether a cleared run continues with the remaining messages; else it reads all again."""
        return self.kind not in (ARCHIVE, RUN)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that :meth:`from_json` reads back; empty for the live queue."""
        if self == RunSource():
            return {}
        return {
            "kind": self.kind,
            "interval": None
            if self.interval is None
            else [timestamp.isoformat() for timestamp in self.interval],
            "run_id": self.run_id,
            "only": dict(self.only),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunSource:
        """Reads what :meth:`to_json` wrote."""
        if not value:
            return cls()
        interval = value["interval"]
        return cls(
            kind=value["kind"],
            interval=None
            if interval is None
            else Interval(*(datetime.fromisoformat(text) for text in interval)),
            run_id=value["run_id"],
            only=value["only"],
        )
