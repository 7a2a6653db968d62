"""How much of a group's topics waits; all else that people ask is in ``group``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.backfill import bounds_of, check_over
from airflow_broadway.producers.kafka.client import Cluster, Place
from airflow_broadway.producers.kafka.group import rehearsed
from airflow_broadway.producers.kafka.opening import missing_topics, own_places
from airflow_broadway.producers.kafka.options import FetchConfig
from airflow_broadway.producers.kafka.ranges import (
    Ranges,
    contains,
    count,
    minus,
    normal,
    of_offsets,
)

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

__all__ = ["count_interval", "depth"]

log = logging.getLogger(__name__)

#: Seconds that the first messages may take, of which only their instants are wanted.
_FETCH_TIMEOUT: Final = 5.0
#: Bytes of a partition that are enough for its first message: a larger one comes all the same.
_FETCH_BYTES: Final = 64 * 1024
#: Messages of one answer, at most.
_FETCH_MOST: Final = 1_000


def depth(producer: KafkaOptions, env: ProducerEnv) -> QueueDepth:
    """How much of the topics waits, by the tables as the next run would find them.

    Kafka counts offsets: what was aborted or compacted away is counted too.

    :raises ProducerError: If that run would be refused, as where another staging folder keeps the
        group: what is finished nobody can tell here.
    """
    once = replace(
        producer,
        begin_offset="assigned",
        fetch_config=FetchConfig(max_bytes=_FETCH_BYTES, max_wait_time=0.1),
        settings={**(producer.settings or {}), "queued.min.messages": 1},
    )
    with rehearsed(once, env) as (cluster, register, places):
        now = env.clock.now().timestamp()
        waits: dict[Place, Ranges] = {}
        leased = delayed = 0
        for place in places:
            table = register.known(place)
            assert table is not None
            later = [offset for offset, held in table.held.items() if held.not_before > now]
            claimed = [each for claim in table.claims.values() for each in claim.ranges]
            log_end = cluster.ends(place)[1]
            taken = normal([*table.done, *claimed, *of_offsets(later)])
            waits[place] = minus(normal([(table.base, log_end)]), taken)
            leased += count(normal(claimed))
            delayed += len(later)
        return QueueDepth(
            ready=sum(map(count, waits.values())),
            delayed=delayed,
            leased=leased,
            dead=_dead(producer, cluster),
            oldest_age=_oldest_age(cluster, env.clock, waits),
        )


def count_interval(producer: KafkaOptions, env: ProducerEnv) -> int:
    """How many offsets a backfill of the environment's interval reads.

    :raises ProducerError: If that backfill would be refused.
    """
    assert env.interval is not None
    check_over(env.interval, env.clock)
    cluster = Cluster(producer, env)
    try:
        _, partitions = cluster.metadata()
        for text in missing_topics(producer, cluster, partitions):
            raise ProducerError(text)
        places = own_places(partitions, 0, 1)
        bounds = bounds_of(producer, cluster, places, env.interval)
        return sum((table.limit or 0) - table.base for table in bounds.values())
    finally:
        cluster.close()


def _dead(producer: KafkaOptions, cluster: Cluster) -> int:
    found = 0
    for topic in sorted({producer.dead_letter_of(each) for each in producer.topics}):
        for number in cluster.partitions(topic):
            first, last = cluster.ends((topic, number))
            found += last - first
    return found


def _oldest_age(cluster: Cluster, clock: Clock, waits: Mapping[Place, Ranges]) -> float | None:
    """Seconds since the oldest of the first messages that wait was sent.

    :returns: ``None`` if none waits, and where one fetch does not tell: it takes too long, or the
        first messages have no instant, or none of them is among the first that wait.
    """
    left = {place: ranges for place, ranges in waits.items() if ranges}
    if not left:
        return None
    instants: list[float] = []
    cluster.assign({place: ranges[0][0] for place, ranges in left.items()})
    until = clock.monotonic() + _FETCH_TIMEOUT
    while left and clock.monotonic() < until:
        for record in cluster.consume(_FETCH_MOST, 0.1):
            place = record.topic(), record.partition()
            if place not in left:
                continue
            if record.error() is None:
                if not contains(left[place], record.offset()):
                    continue  # somebody has it, or is done with it
                kind, instant = record.timestamp()
                if kind:
                    instants.append(instant / 1000)
            cluster.leave([place])
            del left[place]
    if left:
        log.info("The age of the oldest message is not known: its partition did not answer in time")
        return None
    return max(0.0, clock.now().timestamp() - min(instants)) if instants else None
