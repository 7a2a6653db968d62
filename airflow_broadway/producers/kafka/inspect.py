"""Checks a group and counts its backlog, without changing anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Final

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka import opening
from airflow_broadway.producers.kafka.claims import Claims, Place, group_files, places_of
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.options import KafkaOptions
from airflow_broadway.producers.kafka.records import copy_of
from airflow_broadway.producers.kafka.settling import Ranges, clip, count, minus, of_offsets

log = logging.getLogger(__name__)

#: The timeout in seconds for fetching the first messages, whose timestamps are reported.
_FETCH_TIMEOUT: Final = 5.0
#: Small fetches are enough for one message; Kafka returns a larger first message all the same.
_FETCH_SETTINGS: Final = {
    "max.partition.fetch.bytes": 64 * 1024,
    "fetch.wait.max.ms": 100,
    "queued.min.messages": 1,
}


@contextmanager
def _open_group(
    producer: KafkaOptions, env: ProducerEnv
) -> Iterator[tuple[Cluster, opening.Opening, dict[Place, opening.View], list[Finding]]]:
    """Determines the state of a group before the next run."""
    with closing(Cluster(producer, env)) as cluster:
        partitions = cluster.topics()
        claims = Claims(group_files(env.staging, cluster.id, producer.group_id))
        group = opening.Opening(producer, env, cluster, claims, partitions, write=False)
        yield cluster, group, *group.look(places_of(partitions))


def check(producer: KafkaOptions, env: ProducerEnv) -> list[Finding]:
    """Returns the findings with which the next run would be refused or would warn.

    :raises ProducerError: If a request to the cluster fails.
    """
    with _open_group(producer, env) as (_, group, _, findings):
        return [*group.check(), *findings]


def depth(producer: KafkaOptions, env: ProducerEnv) -> QueueDepth:
    """Counts the backlog before the next run.

    It counts offsets, so aborted and compacted messages are included.  A retry topic whose first
    message is not due counts as delayed as a whole.

    :raises ProducerError: If that run would be refused.
    """
    settings = {**(producer.settings or {}), **_FETCH_SETTINGS}
    with _open_group(replace(producer, settings=settings), env) as (cluster, _, views, findings):
        missing = opening.missing_topics(producer, cluster, {topic for topic, _ in views})
        refused = [*missing, *(finding.text for finding in findings if finding.level == "error")]
        if refused:
            raise ProducerError(refused[0])
        now = env.clock.now().timestamp()
        ready: dict[Place, Ranges] = {}
        leased = delayed = 0
        for place, view in views.items():
            state = view.state
            delayed_offsets = [o for o, message in state.failed.items() if message.not_before > now]
            left = minus(((state.start, view.end),) if state.start < view.end else (), state.done)
            held = view.known.end if view.held_until and view.known else 0
            leased += count(clip(left, 0, held))
            left = clip(left, held, view.end)
            blocked = clip(left, min(delayed_offsets), view.end) if delayed_offsets else ()
            # With order='partition', reading stops at the first message that is not due.
            waiting = blocked if producer.order == "partition" else of_offsets(delayed_offsets)
            delayed += count(waiting)
            ready[place] = minus(left, waiting)
        first, complete = _first_messages(cluster, ready)
        ages: list[float] = []
        for place, record in first.items():
            copy = copy_of(record, producer.group_id)
            kind, timestamp = (copy or record).timestamp()
            if copy is not None and copy.not_before > now:
                delayed += count(ready.pop(place))
            elif kind:
                ages.append(now - timestamp / 1000)
        return QueueDepth(
            ready=sum(map(count, ready.values())),
            delayed=delayed,
            leased=leased,
            dead=_count_dead_letters(producer, cluster),
            oldest_age=max(0.0, *ages) if ages and complete else None,
        )


def count_interval(producer: KafkaOptions, env: ProducerEnv) -> int:
    """Counts the offsets that a backfill of the environment's interval reads.

    :raises ProducerError: If that backfill would be refused.
    """
    opening.interval_of(env)
    with closing(Cluster(producer, env)) as cluster:
        partitions = cluster.topics()
        for text in opening.missing_topics(producer, cluster, partitions):
            raise ProducerError(text)
        own = {topic: partitions[topic] for topic in producer.topics}
        bounds = opening.bounds_of(producer, env, cluster, places_of(own))
        return sum(claim.limit - claim.start for claim in bounds.values())


def _count_dead_letters(producer: KafkaOptions, cluster: Cluster) -> int:
    topics = {topic: cluster.partitions(topic) for topic in producer.dead_letter_topics}
    return sum(end - low for low, end in map(cluster.ends, places_of(topics)))


def _first_messages(
    cluster: Cluster, wanted: Mapping[Place, Ranges]
) -> tuple[dict[Place, Any], bool]:
    """Fetches the first message of each partition; returns whether all arrived in time."""
    first: dict[Place, Any] = {}
    action = "the age of the oldest message is not known"
    try:
        first.update(cluster.read(wanted, action, first=True, timeout=_FETCH_TIMEOUT))
    except ProducerError as error:
        log.info("%s", error)
        return first, False
    return first, True
