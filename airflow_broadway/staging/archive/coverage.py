"""Describes known gaps of an archived interval, as sentences."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from airflow_broadway.core.model.pipeline_options import Archive
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.text import many
from airflow_broadway.staging.archive.reader import ArchivedInterval, begun_at, removed_in
from airflow_broadway.staging.store import Folder


def gaps_of(
    archive: Folder, contents: ArchivedInterval, interval: Interval, options: Archive, now: datetime
) -> list[str]:
    """Lists the known gaps of an interval, one sentence each.

    An hour without messages is not a gap, since a queue may be idle.
    """
    begun = begun_at(archive)
    if begun is None:
        return ["nothing was archived yet: messages are, once a run has settled them"]
    gaps: list[str] = []
    # For another time field it is unknown when the last message of an interval arrives.
    by_arrival = options.time in ("received_at", "enqueued_at")
    if not contents.hours:
        gaps.append("nothing is archived of it")
    if by_arrival and interval.start < begun and options.time == "received_at":
        gaps.append(f"the archive was begun only at {begun.isoformat()}")
    if by_arrival and interval.end > now:
        gaps.append(f"it is not over yet: it ends at {interval.end.isoformat()}")
    if removed_in(archive, interval):
        gaps.append("some of it was removed, by retention or by hand")
    if contents.lost:
        lost = many(len(contents.lost), "file")
        gaps.append(f"{lost} of it are gone, such as {archive.path}/{contents.lost[0]}")
    return gaps


def remarks_of(contents: ArchivedInterval) -> Sequence[str]:
    """Lists remarks about the archived messages, as sentences."""
    return [
        f"{many(count, 'message')} of its executions had no time, and were archived by their time"
        f" of receipt: {why}"
        for why, count in contents.untimed.items()
    ]
