"""Reports what the next run would say of a group, and how much waits.

Nothing is changed, and nothing is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.backfill import bounds_of, check_over
from airflow_broadway.producers.kafka.claims import Claims, Place, group_files
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.offsets import (
    Ranges,
    clip,
    contains,
    count,
    minus,
    of_offsets,
)
from airflow_broadway.producers.kafka.opening import (
    Opening,
    View,
    missing_topics,
    own_places,
)
from airflow_broadway.producers.kafka.options import FetchConfig
from airflow_broadway.producers.kafka.records import origin_of

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

log = logging.getLogger(__name__)

#: Seconds that the first messages may take, of which only their timestamps are wanted.
_FETCH_TIMEOUT: Final = 5.0
#: Bytes of a partition that are enough for its first message: a larger one comes all the same.
_FETCH_BYTES: Final = 64 * 1024
#: Messages of one fetch, at most.
_FETCH_MOST: Final = 1_000


class _Looked(NamedTuple):
    cluster: Cluster
    cluster_id: str
    claims: Claims
    opening: Opening
    views: dict[Place, View]


@contextmanager
def _looked(producer: KafkaOptions, env: ProducerEnv) -> Iterator[_Looked]:
    """Finds a group as the next run would find it."""
    cluster = Cluster(producer, env)
    try:
        cluster_id, partitions = cluster.metadata()
        claims = Claims(group_files(env.staging, cluster_id, producer.group_id), env.clock)
        opening = Opening(producer, cluster, claims, env.clock, partitions, write=False)
        views = opening.look(own_places(partitions, 0, 1))
        yield _Looked(cluster, cluster_id, claims, opening, views)
    finally:
        cluster.close()


def check(producer: KafkaOptions, env: ProducerEnv) -> list[Finding]:
    """Returns what the next run would refuse or warn of.

    :raises ProducerError: If the cluster cannot be asked.
    """
    with _looked(producer, env) as (_, _, _, opening, _):
        return [*opening.check(), *opening.findings]


def depth(producer: KafkaOptions, env: ProducerEnv) -> QueueDepth:
    """Counts what waits, as the next run would find it.

    Kafka counts offsets: what was aborted or compacted away is counted too.  A retry topic whose
    first message is not due waits as a whole.

    :raises ProducerError: If that run would be refused.
    """
    once = replace(
        producer,
        begin_offset="assigned",
        fetch_config=FetchConfig(max_bytes=_FETCH_BYTES, max_wait_time=0.1),
        settings={**(producer.settings or {}), "queued.min.messages": 1},
    )
    with _looked(once, env) as (cluster, _, _, opening, views):
        missing = missing_topics(producer, cluster, {topic: [0] for topic, _ in views})
        refused = [*missing, *(each.text for each in opening.findings if each.level == "error")]
        if refused:
            raise ProducerError(refused[0])
        now = env.clock.now().timestamp()
        waits: dict[Place, Ranges] = {}
        leased = delayed = 0
        for place, view in views.items():
            later = [offset for offset, each in view.failed.items() if each.not_before > now]
            open_ = minus(((view.base, view.end),) if view.base < view.end else (), view.done)
            if view.held_until and view.claim is not None:
                leased += count(minus(clip(open_, 0, view.claim.end), view.claim.done))
                open_ = clip(open_, view.claim.end, view.end)
            behind = clip(open_, min(later), view.end) if later else ()
            # A partition whose order counts stops at the first that waits.
            waiting = behind if producer.order == "partition" else of_offsets(later)
            delayed += count(waiting)
            waits[place] = minus(open_, waiting)
        first, all_told = _first_messages(cluster, env.clock, waits)
        ages: list[float] = []
        for place, record in first.items():
            origin = origin_of(record, producer.group_id)
            kind, timestamp = record.timestamp()
            if origin is not None and origin.not_before > now:
                delayed += count(waits.pop(place))
            elif origin is not None and origin.timestamp is not None:
                ages.append(now - origin.timestamp / 1000)
            elif kind:
                ages.append(now - timestamp / 1000)
        return QueueDepth(
            ready=sum(map(count, waits.values())),
            delayed=delayed,
            leased=leased,
            dead=_dead(producer, cluster),
            oldest_age=max(0.0, *ages) if ages and all_told else None,
        )


def count_interval(producer: KafkaOptions, env: ProducerEnv) -> int:
    """Counts the offsets that a backfill of the environment's interval reads.

    :raises ProducerError: If that backfill would be refused.
    """
    assert env.interval is not None
    check_over(env.interval, env.clock)
    cluster = Cluster(producer, env)
    try:
        _, partitions = cluster.metadata()
        for text in missing_topics(producer, cluster, partitions):
            raise ProducerError(text)
        own = {topic: found for topic, found in partitions.items() if topic in producer.topics}
        bounds = bounds_of(producer, cluster, own_places(own, 0, 1), env.interval)
        return sum(claim.limit - claim.start for claim in bounds.values())
    finally:
        cluster.close()


def _dead(producer: KafkaOptions, cluster: Cluster) -> int:
    found = 0
    for topic in sorted({producer.dead_letter_of(each) for each in producer.topics}):
        for number in cluster.partitions(topic):
            first, last = cluster.ends((topic, number))
            found += last - first
    return found


def _first_messages(
    cluster: Cluster, clock: Clock, waits: Mapping[Place, Ranges]
) -> tuple[dict[Place, Any], bool]:
    """Fetches the first message of each partition that waits.

    :returns: The messages that one fetch has, and whether each partition answered in time.
    """
    left = {place: ranges for place, ranges in waits.items() if ranges}
    found: dict[Place, Any] = {}
    if not left:
        return found, True
    cluster.assign({place: ranges[0][0] for place, ranges in left.items()})
    until = clock.monotonic() + _FETCH_TIMEOUT
    while left and clock.monotonic() < until:
        for record in cluster.consume(_FETCH_MOST, 0.1):
            place = record.topic(), record.partition()
            if place not in left:
                continue
            if record.error() is None:
                if not contains(left[place], record.offset()):
                    continue  # it is finished, or held
                found[place] = record
            cluster.leave([place])
            del left[place]
    if left:
        log.info("The age of the oldest message is not known: its partition did not answer in time")
    return found, not left
