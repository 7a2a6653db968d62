"""Partitions that say nothing, while others may: neither a message nor their end comes.

That is a broker out of reach; or a batch of messages that is damaged in its head, its length: the
client takes it for one that was cut off, and asks for it again and again without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.producers.kafka.claims import Place
from airflow_broadway.producers.kafka.client import Cluster

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock

#: Seconds without a word, where one was due, after which a partition counts as out of reach.
_TIMEOUT: Final = 20.0
#: Seconds between two looks that count, at most: a broker that was away while messages were
#: handled has time to answer.
_LONGEST_STEP: Final = 1.0


class Silence:
    """For how long each partition has said nothing, while it was listened to.

    :param wait: Seconds that a broker waits before it says that nothing has come.
    """

    def __init__(self, cluster: Cluster, clock: Clock, *, wait: float) -> None:
        self._cluster = cluster
        self._wait = wait
        self._clock = clock
        self._seconds: dict[Place, float] = {}
        self._looked = clock.monotonic()

    def heard(self, place: Place) -> None:
        """A message of a partition has come, or its end."""
        self._seconds.pop(place, None)

    def listened(self, places: Iterable[Place], *, all_heard: bool) -> None:
        """Count the time since the last look.

        :param places: Those that are not at their end.
        :param all_heard: Whether nothing that has been fetched was left behind: what a partition
            has to say may stand behind the messages of another.
        """
        now = self._clock.monotonic()
        step, self._looked = min(now - self._looked, _LONGEST_STEP), now
        if all_heard:
            self._seconds = {place: self._seconds.get(place, 0.0) + step for place in places}

    def check(self, positions: Mapping[Place, int]) -> None:
        """See that none has been silent for too long.

        :param positions: Where those are read that are not at their end.
        :raises ProducerUnavailable: Naming the first that has been.
        """
        for place, position in positions.items():
            if self._seconds.get(place, 0.0) > _TIMEOUT + self._wait:
                raise silence_error(self._cluster, place, position, "nothing can be received")


def silence_error(cluster: Cluster, place: Place, position: int, doing: str) -> ProducerUnavailable:
    """Why a partition that is read at an offset says nothing."""
    try:
        end = cluster.ends(place)[1]
    except ProducerError:
        return cluster.unavailable(doing)
    if end <= position:
        return cluster.unavailable(doing)
    why = cluster.last_word() or (
        ": it seems that a batch of messages there is damaged in its head; nothing behind it can be"
        " received"
    )
    return ProducerUnavailable(
        f"{doing} {cluster.where}: the broker answers, but nothing comes of {place[0]}-{place[1]}"
        f" from offset {position} on, and its end is at {end}{why}"
    )
