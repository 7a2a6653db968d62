"""A backfill: the messages of an interval, read from the log, next to live runs.

It has claims of its own, whose offsets are those of the run; the group is not touched.  Messages
are in the log in order of their arrival, and the timestamps that their senders gave them need not
be in that order: so it reads on for ``lateness`` behind the interval, and hands out those messages
whose timestamp is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.claims import Claim, Claims, Place
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.opening import View, last_of
from airflow_broadway.producers.kafka.options import KafkaOptions
from airflow_broadway.producers.kit.state_files import digest

log = logging.getLogger(__name__)

_FOLDER: Final = "backfill"


def folder_of(run_id: str) -> str:
    """Returns the folder of a backfill's claims."""
    return f"{_FOLDER}/{digest(run_id)}"


def milliseconds(interval: tuple[datetime, datetime]) -> tuple[int, int]:
    """Returns an interval in Kafka's unit."""
    start, end = interval
    return round(start.timestamp() * 1000), round(end.timestamp() * 1000)


def check_over(interval: tuple[datetime, datetime], clock: Clock) -> None:
    """Refuses an interval that is not over yet.

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
) -> dict[Place, Claim]:
    """Returns where the interval begins and ends in partitions of which nothing was read."""
    start, end = interval
    first = cluster.at_instants(places, start.timestamp())
    last = cluster.at_instants(places, end.timestamp() + producer.lateness)
    made: dict[Place, Claim] = {}
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
        made[place] = Claim(start=base, limit=max(base, limit))
    return made


class BackfillOpening:
    """Finds where the partitions of a backfill begin: the counterpart of a live run's opening."""

    owner = ""
    losses: frozenset[str] = frozenset()

    def __init__(
        self,
        producer: KafkaOptions,
        cluster: Cluster,
        claims: Claims,
        clock: Clock,
        interval: tuple[datetime, datetime],
    ) -> None:
        self._producer = producer
        self._cluster = cluster
        self._claims = claims
        self._clock = clock
        self._interval = interval
        self.findings: list[Finding] = []

    def check(self) -> list[Finding]:
        """Refuses an interval that is not over yet."""
        check_over(self._interval, self._clock)
        return []

    def look(self, places: Sequence[Place]) -> dict[Place, View]:
        """Finds partitions as they are now.

        Where an interval begins and ends once stands, so that a run that is cleared reads the same.
        """
        unknown = [place for place in places if self._claims.read(place) is None]
        if unknown:
            bounds = bounds_of(self._producer, self._cluster, unknown, self._interval)
            for place, made in bounds.items():
                self._claims.change(place, lambda known, made=made: known or made)  # type: ignore[misc]
        return {place: self._look(place) for place in places}

    def _look(self, place: Place) -> View:
        claim = self._claims.read(place)
        assert claim is not None
        holder = self._claims.holder(claim, self._clock.now().timestamp())
        if holder is not None:
            return View(claim.start, claim.high, claim.limit, claim, held_until=holder[1])
        last = last_of(self._claims, claim, place)
        return View(
            last.start,
            claim.high,
            claim.limit,
            claim,
            settled=last.settled,
            done=last.done,
            failed=last.failed,
            limit=claim.limit,
        )
