"""A backfill: the messages of an interval, read from the log, beside live runs.

It has tables of its own, of which each has a beginning and an end; the group, its offsets and its
tables are not touched.  Messages stand in the log in order of their arrival, and the instants that
their senders gave them need not be in that order: so it reads on for ``lateness`` behind the
interval, and hands out those messages whose instant is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.client import Cluster, Place
from airflow_broadway.producers.kafka.options import KafkaOptions
from airflow_broadway.producers.kafka.register import Register
from airflow_broadway.producers.kafka.table import Table
from airflow_broadway.producers.kit.state_files import digest

__all__ = ["BackfillOpening", "bounds_of", "check_over", "folder_of", "milliseconds"]

log = logging.getLogger(__name__)

_FOLDER: Final = "backfill"


def folder_of(run_id: str) -> str:
    """Where the tables of a backfill are."""
    return f"{_FOLDER}/{digest(run_id)}"


def milliseconds(interval: tuple[datetime, datetime]) -> tuple[int, int]:
    """An interval as Kafka counts."""
    start, end = interval
    return round(start.timestamp() * 1000), round(end.timestamp() * 1000)


def check_over(interval: tuple[datetime, datetime], clock: Clock) -> None:
    """Refuse an interval that is not over yet.

    :raises ProducerError: Saying so.
    """
    start, end = interval
    if end > clock.now():
        raise ProducerError(
            f"the interval from {start.isoformat()} to {end.isoformat()} is not over yet: what"
            " is still to be sent belongs to it; run the backfill later"
        )


def bounds_of(
    producer: KafkaOptions,
    cluster: Cluster,
    places: Sequence[Place],
    interval: tuple[datetime, datetime],
) -> dict[Place, Table]:
    """The tables of partitions of which nothing was read: where the interval begins and ends."""
    start, end = interval
    first = cluster.at_instants(places, start.timestamp())
    last = cluster.at_instants(places, end.timestamp() + producer.lateness)
    made: dict[Place, Table] = {}
    for place in places:
        low, high = cluster.ends(place)
        # -1: no message is as late as that.
        base = first[place] if first[place] >= 0 else high
        limit = last[place] if last[place] >= 0 else high
        if base == low > 0:
            log.warning(
                "%s-%d begins at %d, within the interval or at its edge: what retention has"
                " removed of it is not read.",
                *place,
                low,
            )
        made[place] = Table(base=base, limit=max(base, limit))
    return made


class BackfillOpening:
    """Opens the partitions of one source of a backfill.

    :param places: Those of this source.
    """

    #: As of a live opening: nothing is known of what retention removed.
    expired = 0

    def __init__(
        self,
        producer: KafkaOptions,
        cluster: Cluster,
        register: Register,
        clock: Clock,
        places: Sequence[Place],
        interval: tuple[datetime, datetime],
    ) -> None:
        self._producer = producer
        self._cluster = cluster
        self._register = register
        self._clock = clock
        self._places = places
        self._interval = interval

    def open(self) -> None:
        """See that each partition has a table: where the interval begins, and where it ends.

        What it is once stands, so that a run that is cleared reads the same.

        :raises ProducerError: If the interval is not over yet.
        """
        check_over(self._interval, self._clock)
        unknown = [place for place in self._places if self._register.read(place) is None]
        if not unknown:
            return
        bounds = bounds_of(self._producer, self._cluster, unknown, self._interval)
        for place, made in bounds.items():

            def begun(table: Table | None, made: Table = made) -> tuple[Table, None]:
                return table or made, None

            self._register.change(place, begun)
