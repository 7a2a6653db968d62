"""Removes hours of an archive, by retention or on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from airflow_broadway.core.errors import RequestRefused
from airflow_broadway.core.formats.layout import VERSION
from airflow_broadway.core.model.run_source import Interval
from airflow_broadway.staging.archive.layout import (
    AGAIN,
    REMOVED,
    hour_of,
    index_path,
    mark_of,
    partition_of,
    start_of,
)
from airflow_broadway.staging.archive.reader import generations_in, hours_of, look, read_index
from airflow_broadway.staging.store import Folder

_FIRST: Final = datetime(1, 1, 1, tzinfo=UTC)
#: Maximum hours that one sweep removes, so that it does not delay a run.
_MAX_HOURS: Final = 48


class Removed(NamedTuple):
    """The number of removed hours, and of archived messages in them."""

    hours: int
    messages: int


def purge(archive: Folder, interval: Interval, now: datetime) -> Removed:
    """Removes an interval permanently; later reads report the gap.

    :raises RequestRefused: If it does not begin and end on the hour.
    :raises StagingError: If it cannot be removed.
    """
    for bound in interval:
        if start_of(hour_of(bound)) != bound:
            raise RequestRefused(
                f"{bound.isoformat()} is not the beginning of an hour, and an archive is removed by"
                " the hour: nothing was removed"
            )
    stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%S%f")
    _record_removal(archive, f"{stamp}.json", interval, now)
    return _remove_hours(archive, list(hours_of(archive, interval)))


def remove_old(archive: Folder, keep: float, now: datetime) -> Removed:
    """Removes the hours that ended longer than ``keep`` seconds ago, oldest first.

    :raises StagingError: If they cannot be removed.
    """
    end = start_of(hour_of(now - timedelta(seconds=keep)))
    due = [hour for hour in hours_of(archive) if start_of(hour) < end][:_MAX_HOURS]
    if not due:
        return Removed(0, 0)
    # Recorded first, so that concurrent reads report the gap.
    _record_removal(archive, "retention.json", Interval(_FIRST, start_of(due[-1] + 1)), now)
    return _remove_hours(archive, due)


def _record_removal(archive: Folder, name: str, interval: Interval, now: datetime) -> None:
    start, end = (bound.isoformat() for bound in interval)
    value = {"version": VERSION, "start": start, "end": end, "at": now.isoformat()}
    archive.replace(f"{REMOVED}/{name}", json.dumps(value))


def _remove_hours(archive: Folder, hours: Sequence[int]) -> Removed:
    messages = 0
    for hour in hours:
        contents = look(archive, Interval(start_of(hour), start_of(hour + 1)))
        messages += contents.messages
        folder = partition_of(hour)
        generations = generations_in(archive, hour)
        archive.store.folder(f"{archive.path}/{folder}").remove_all()
        for generation in generations:
            index = read_index(archive, generation)
            if index is not None and not any(map(archive.exists, index.files)):
                archive.remove(index_path(generation))
                if index.again:
                    _remove_again(archive, generation)
            mark = mark_of(hour, generation)
            archive.remove(mark)
            # A writer that put an index meanwhile has seen the mark and does not create it again.
            if index is None and read_index(archive, generation) is not None:
                archive.create(mark, "")
    return Removed(len(hours), messages)


def _remove_again(archive: Folder, generation: str) -> None:
    """Removes the records of its dead letters, including those of settlers that died."""
    for name in archive.list(AGAIN):
        if name.startswith(f"{generation}-"):
            archive.remove(f"{AGAIN}/{name}")
