"""What is known to be missing of an interval: sentences for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from airflow_broadway.core.model.pipeline_options import Archive
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.core.text import many
from airflow_broadway.staging.archive.reader import Found, begun_at, removed_in
from airflow_broadway.staging.store import Folder


def gaps_of(
    archive: Folder, found: Found, interval: Interval, options: Archive, now: datetime
) -> list[str]:
    """Why an interval is not whole, one sentence each; empty if nothing is known to be missing.

    An hour without messages is none: a queue may be quiet.
    """
    begun = begun_at(archive)
    if begun is None:
        return ["nothing was archived yet: messages are, once a run has settled them"]
    gaps: list[str] = []
    # Of another time nobody knows when the last message of an interval comes.
    by_arrival = options.time in ("received_at", "enqueued_at")
    if not found.hours:
        gaps.append("nothing is archived of it")
    if by_arrival and interval.start < begun and options.time == "received_at":
        gaps.append(f"the archive was begun only at {begun.isoformat()}")
    if by_arrival and interval.end > now:
        gaps.append(f"it is not over yet: it ends at {interval.end.isoformat()}")
    if removed_in(archive, interval):
        gaps.append("some of it was removed, by retention or by hand")
    if found.lost:
        lost = many(len(found.lost), "file")
        gaps.append(f"{lost} of it are gone, such as {archive.path}/{found.lost[0]}")
    return gaps


def remarks_of(found: Found) -> Sequence[str]:
    """What people should know of what was read."""
    return [
        f"{many(count, 'message')} of the executions it is made of gave no time, and were kept by"
        f" when they were received: {why}"
        for why, count in found.untimed.items()
    ]
