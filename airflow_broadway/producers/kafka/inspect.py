"""What a group and its topics say of themselves, for people: how much waits, who holds what.

Beside it the two things that people do to a group by hand: :func:`adopt` and :func:`reset`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.kafka.client import Cluster, Committed, Place
from airflow_broadway.producers.kafka.opening import (
    Mark,
    live_claims,
    mark_of,
    own_places,
    read_mark,
    reset_table,
)
from airflow_broadway.producers.kafka.ranges import count, intersection
from airflow_broadway.producers.kafka.register import Register, group_files
from airflow_broadway.producers.kafka.table import Table

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

__all__ = ["HeldBy", "PartitionState", "adopt", "depth", "reset", "states"]


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


def adopt(producer: KafkaOptions, env: ProducerEnv) -> dict[Place, int]:
    """Let this staging folder keep the group from now on, from its offsets in Kafka on.

    What another staging folder knows of messages beyond these offsets is lost: they come again, and
    as redelivered as far as they had been handed out.

    :returns: Where each partition goes on.
    :raises ProducerError: If a run holds messages by a table of this staging folder.
    """
    with _opened(producer, env) as group:
        register, owner = group.register, group.register.owner()
        marks: dict[Place, Committed] = {}
        for place, found in group.committed.items():
            mark = read_mark(found.metadata) or Mark("", 0, found.offset)
            table = register.read(place)
            if table is None:
                begun = Table(base=found.offset, marks=_between(found.offset, mark.highest))
                marks[place] = mark_of(begun, owner, 0)
                continue
            _refuse_live(register, place, table, env)
            _change(register, place, found.offset, mark.highest)
            known = register.known(place)
            assert known is not None
            marks[place] = mark_of(known, owner, register.version(place))
        group.cluster.commit(marks)
        return {place: each.offset for place, each in marks.items()}


def reset(
    producer: KafkaOptions, env: ProducerEnv, offsets: Mapping[Place, int]
) -> dict[Place, int]:
    """Let the group go on at other offsets: the next run honours them.

    :param offsets: Those of partitions that are to be changed.
    :returns: What was committed, each within its log.
    :raises ProducerError: If a run holds messages of such a partition.
    """
    with _opened(producer, env) as group:
        made: dict[Place, Committed] = {}
        for place, offset in offsets.items():
            if place not in group.places:
                raise ProducerError(
                    f"there is no partition {place[0]}-{place[1]} among the producer's topics"
                )
            table = group.register.read(place)
            if table is not None:
                _refuse_live(group.register, place, table, env)
            low, end = group.cluster.ends(place)
            made[place] = Committed(min(max(low, offset), end), "")
        group.cluster.commit(made)
        return {place: each.offset for place, each in made.items()}


def _refuse_live(register: Register, place: Place, table: Table, env: ProducerEnv) -> None:
    live = live_claims(register, table, env.clock.now().timestamp())
    holders = [each for each in live if table.claims[each].ranges]
    if holders:
        raise ProducerError(
            f"generation {holders[0]} holds messages of {place[0]}-{place[1]}: let that run end, or"
            " its lease lapse"
        )


def _between(low: int, high: int) -> tuple[tuple[int, int], ...]:
    return ((low, high),) if low < high else ()


def _change(register: Register, place: Place, offset: int, highest: int) -> None:
    def changed(table: Table | None) -> tuple[Table, None]:
        made = reset_table(table, offset)
        return made if table is None else made.marked(_between(offset, highest)), None

    register.change(place, changed)
