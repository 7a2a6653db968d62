"""Values that the embedded queue hands out, and how it keeps instants."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Final, NamedTuple

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.custody.report import SettleReport

__all__ = ["KIND", "LeaseRecord", "QueueRow", "from_micros", "ranges", "to_micros"]

#: The kind of the queue's leases.
KIND: Final = "sqlite"

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


def to_micros(instant: datetime) -> int:
    """Microseconds since 1970 in UTC."""
    return (instant - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    """The instant that :func:`to_micros` gave."""
    return _EPOCH + timedelta(microseconds=micros)


class QueueRow(NamedTuple):
    """A row of ``queues``: the queue's key, and the first half of its messages' ids."""

    id: int
    tag: str

    def row_of(self, message_id: str) -> int | None:
        """The row of a message id, or ``None`` if it is not of this queue."""
        tag, _, row = message_id.rpartition("-")
        if tag != self.tag or not (row.isascii() and row.isdecimal() and len(row) < 19):
            return None
        if row[0] == "0":  # one row has one id
            return None
        return int(row)


class LeaseRecord(NamedTuple):
    """What the queue knows of a lease, open or ended.

    :param state: ``"open"``, ``"settled"``, ``"released"`` or ``"lapsed"``.
    :param received: Messages received under it, in all.
    :param held: Messages that it holds now.
    :param settled_early: What ``settle_now`` did under it; not part of ``report``.
    :param report: How it ended; ``None`` while it is open.
    """

    lease: Lease
    state: str
    received: int
    held: int
    opened_at: datetime
    ended_at: datetime | None
    settled_early: SettleReport
    report: SettleReport | None


def ranges(rows: list[int]) -> list[tuple[int, int]]:
    """The same numbers as closed ranges, ascending: as a rule one.  No number may come twice."""
    rows.sort()
    if rows and rows[-1] - rows[0] == len(rows) - 1:
        return [(rows[0], rows[-1])]
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and row == found[-1][1] + 1:
            found[-1] = (found[-1][0], row)
        else:
            found.append((row, row))
    return found
