"""What a group and its topics say of themselves: how much waits, who holds what.

What is wrong with a group, and what people do to it by hand, is
:mod:`airflow_broadway.producers.kafka.group`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.producers.kafka.client import Cluster, Committed, Place
from airflow_broadway.producers.kafka.opening import (
    own_places,
    read_mark,
)
from airflow_broadway.producers.kafka.ranges import count, intersection
from airflow_broadway.producers.kafka.register import Register, group_files
from airflow_broadway.producers.kafka.table import Table

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

__all__ = ["HeldBy", "PartitionState", "depth", "states"]


class HeldBy(NamedTuple):
    """Who holds messages of a partition.

    :param owner: Its dag_id, run_id, task_id, …; empty where it is not known.
    :param until: When its lease ends.
    """

    generation: str
    owner: Mapping[str, Any]
    offsets: int
    until: datetime


class PartitionState(NamedTuple):
    """One partition of a group.

    :param start: The first offset of the log.
    :param base: All before it is finished.
    :param end: The offset behind the last message that may be read.
    :param committed: The offset in Kafka; ``None``: there is none.
    :param kept_by: ``"us"``, ``"others"`` (another staging folder or pipeline), or ``"nobody"``.
    :param ready: Offsets that a run could take now.
    :param delayed: Messages that wait to be tried again.
    :param done: Offsets that are finished beyond the base.
    :param claims: Who holds messages.
    :param suspect: Offsets that were in hand when processes died.
    """

    topic: str
    partition: int
    start: int
    base: int
    end: int
    committed: int | None
    kept_by: str
    ready: int
    delayed: int
    done: int
    claims: tuple[HeldBy, ...]
    suspect: int

    @property
    def lag(self) -> int:
        """Offsets that are not finished, whoever holds them."""
        return max(0, self.end - max(self.base, self.start) - self.done)


class _Group(NamedTuple):
    cluster: Cluster
    register: Register
    places: list[Place]
    committed: Mapping[Place, Committed]


@contextmanager
def _opened(producer: KafkaOptions, env: ProducerEnv) -> Iterator[_Group]:
    cluster = Cluster(producer, env)
    try:
        cluster_id, partitions = cluster.metadata()
        register = Register(group_files(env.staging, cluster_id, producer.group_id), env.clock)
        places = own_places(partitions, 0, 1)
        yield _Group(cluster, register, places, cluster.committed(places))
    finally:
        cluster.close()


def states(producer: KafkaOptions, env: ProducerEnv) -> list[PartitionState]:
    """Each partition of the producer's topics; changes nothing.

    :raises ProducerError: If the cluster cannot be asked.
    """
    now = env.clock.now().timestamp()
    with _opened(producer, env) as group:
        return [_state(group, place, now) for place in group.places]


def _state(group: _Group, place: Place, now: float) -> PartitionState:
    low, end = group.cluster.ends(place)
    found = group.committed.get(place)
    table = group.register.read(place)
    if table is None:
        table = Table(base=low if found is None else found.offset)
    log = ((max(low, table.base), end),) if end > max(low, table.base) else ()
    waiting = sum(held.not_before > now for held in table.held.values())
    claimed = sum(count(each.ranges) for each in table.claims.values())
    done = count(intersection(table.done, log))
    mark = None if found is None else read_mark(found.metadata)
    kept = "nobody" if mark is None or not mark.owner else "others"
    if mark is not None and mark.owner and mark.owner == group.register.owner_if_known():
        kept = "us"
    return PartitionState(
        topic=place[0],
        partition=place[1],
        start=low,
        base=table.base,
        end=end,
        committed=None if found is None else found.offset,
        kept_by=kept,
        ready=max(0, count(log) - done - claimed - waiting),
        delayed=waiting,
        done=done,
        claims=tuple(
            HeldBy(
                generation,
                group.register.generation(generation).owner(),
                count(each.ranges),
                datetime.fromtimestamp(
                    max(each.until, group.register.generation(generation).deadline() or 0.0),
                    timezone.utc,
                ),
            )
            for generation, each in table.claims.items()
            if each.ranges
        ),
        suspect=sum(each.high - each.low for each in table.crashes),
    )


def depth(producer: KafkaOptions, env: ProducerEnv) -> QueueDepth | None:
    """How much of the topics waits, by the tables, or by the group's offsets where there is none.

    Kafka counts offsets: what was aborted or compacted away is counted too.
    """
    now = env.clock.now().timestamp()
    with _opened(producer, env) as group:
        found = [_state(group, place, now) for place in group.places]
        dead = 0
        for topic in sorted({producer.dead_letter_of(each) for each in producer.topics}):
            for number in group.cluster.partitions(topic):
                first, last = group.cluster.ends((topic, number))
                dead += last - first
    return QueueDepth(
        ready=sum(each.ready for each in found),
        delayed=sum(each.delayed for each in found),
        leased=sum(held.offsets for each in found for held in each.claims),
        dead=dead,
        oldest_age=None,
    )
