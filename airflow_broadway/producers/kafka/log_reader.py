"""Reads parts of the log again, for dead letters, retries and the age of a backlog."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from airflow_broadway.producers.kafka.claims import Place
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.errors import is_out_of_range, is_passing
from airflow_broadway.producers.kafka.offsets import Range, Ranges

#: A gap between two wanted ranges from which on seeking is cheaper than reading on.
_SEEK_GAP: Final = 2_000
#: Seconds without a message, or an event, after which the cluster is out of reach.
_SILENCE_TIMEOUT: Final = 20.0


def read_log(
    cluster: Cluster,
    wanted: Mapping[Place, Ranges],
    action: str,
    *,
    first: bool = False,
    timeout: float = 0.0,
) -> Iterator[tuple[Place, Any]]:
    """Yields the records at some offsets, in order of each partition; the rest are gone.

    It takes the cluster's consumer for itself.

    :param action: What is tried, for errors.
    :param first: Whether the first record of each partition is enough.
    :param timeout: Seconds without an answer; 0: as usual.
    :raises ProducerUnavailable: If a partition does not answer.
    """
    # Reversed: those that are done with are taken from the end.
    waiting = {place: list(reversed(ranges)) for place, ranges in wanted.items() if ranges}
    assigned = False
    heard = time.monotonic()
    while waiting:
        if not assigned:
            cluster.assign({place: ranges[-1][0] for place, ranges in waiting.items()})
            assigned = True
        records = cluster.consume(500, 0.1)
        if records:
            heard = time.monotonic()
        elif time.monotonic() - heard > (timeout or _SILENCE_TIMEOUT):
            silent, ranges = next(iter(waiting.items()))
            raise cluster.silence(silent, ranges[-1][0], action)
        for record in records:
            place = record.topic(), record.partition()
            ranges = waiting.get(place, [])
            if not ranges:
                continue
            error = record.error()
            if error is None:
                offset = record.offset()
                _drop_below(ranges, offset)
                if ranges and ranges[-1][0] == offset:
                    yield place, record
                    if first:
                        ranges.clear()
                _drop_below(ranges, offset + 1)
                if ranges and ranges[-1][0] - offset > _SEEK_GAP:
                    cluster.seek(place, ranges[-1][0])
            elif error.code() == cluster.eof:
                _drop_below(ranges, record.offset())
            elif is_out_of_range(error):
                low, end = cluster.ends(place)
                ranges[:] = [(max(low, a), min(end, b)) for a, b in ranges if low < b and a < end]
                assigned = (
                    False  # the client reads no more of a partition that it could not read on
                )
            elif not is_passing(error):
                raise cluster.error(error, action)
            if not ranges:
                del waiting[place]
                cluster.leave(place)


def _drop_below(ranges: list[Range], offset: int) -> None:
    """Removes what is below an offset."""
    while ranges and ranges[-1][1] <= offset:
        ranges.pop()
    if ranges and ranges[-1][0] < offset:
        ranges[-1] = offset, ranges[-1][1]
