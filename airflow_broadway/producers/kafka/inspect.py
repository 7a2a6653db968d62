"""What a group and its topics say of themselves: how much waits, who holds what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.producers.kafka.client import Cluster
from airflow_broadway.producers.kafka.opening import own_places
from airflow_broadway.producers.kafka.ranges import count, intersection
from airflow_broadway.producers.kafka.register import Register, group_files

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

__all__ = ["depth"]


def depth(producer: KafkaOptions, env: ProducerEnv) -> QueueDepth | None:
    """How much of the topics waits, by the tables, or by the group's offsets where there is none.

    Kafka counts offsets: what was aborted or compacted away is counted too.
    """
    cluster = Cluster(producer, env)
    try:
        cluster_id, partitions = cluster.metadata()
        register = Register(group_files(env.staging, cluster_id, producer.group_id), env.clock)
        places = own_places(partitions, 0, 1)
        committed = cluster.committed(places)
        now = env.clock.now().timestamp()
        ready = delayed = leased = 0
        for place in places:
            low, end = cluster.ends(place)
            table = register.read(place)
            if table is None:
                start = committed[place].offset if place in committed else low
                ready += max(0, end - max(low, start))
                continue
            log = ((max(low, table.base), end),)
            waiting = sum(held.not_before > now for held in table.held.values())
            held = sum(count(each.ranges) for each in table.claims.values())
            ready += max(0, count(log) - count(intersection(table.done, log)) - held - waiting)
            delayed += waiting
            leased += held
        dead = 0
        for topic in sorted({producer.dead_letter_of(each) for each in producer.topics}):
            for number in cluster.partitions(topic):
                first, last = cluster.ends((topic, number))
                dead += last - first
        return QueueDepth(ready, delayed, leased, dead, None)
    finally:
        cluster.close()
