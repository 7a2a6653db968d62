"""A group as people look at it, and what they do to it: its partitions, what is wrong, the cure.

What is wrong is what a run would say: it is opened here as by a run (``opening``), on tables that
are changed in memory alone and offsets that are not committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.errors import ProducerError, ProducerUnavailable
from airflow_broadway.core.text import many
from airflow_broadway.producers.kafka import opening
from airflow_broadway.producers.kafka.client import Cluster, Committed, Place
from airflow_broadway.producers.kafka.opening import Opening, live_claims, mark_of, read_mark
from airflow_broadway.producers.kafka.ranges import count
from airflow_broadway.producers.kafka.register import Register, Version, group_files
from airflow_broadway.producers.kafka.table import Table

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.kafka.options import KafkaOptions

__all__ = [
    "Claimed",
    "Group",
    "Partition",
    "adopt",
    "look",
    "rehearsed",
    "reset",
]

T = TypeVar("T")


class Claimed(NamedTuple):
    """What one execution of a process task holds of a partition.

    :param run: The DAG's id and the run's, where it has written them down.
    :param until: When its lease ends, ISO 8601.
    :param live: Whether that is still to come, with the grace that others give it.
    """

    topic: str
    partition: int
    generation: str
    run: str
    offsets: int
    until: str
    live: bool


class Partition(NamedTuple):
    """One partition; all numbers are offsets, or how many of them.

    :param start: The first that is in the log.
    :param base: All below it is finished; ``None``: no run has been here.
    :param committed: What Kafka keeps of the base.
    :param end: Behind the last.
    :param lag: From the base, or what is committed, to the end.
    :param claimed: In the hands of runs.
    :param held: Failed, and to be tried again.
    :param done: Finished beyond the base.
    """

    topic: str
    partition: int
    start: int
    base: int | None
    committed: int | None
    end: int
    lag: int | None
    claimed: int
    held: int
    done: int


class Group(NamedTuple):
    """A group, by its tables and by what Kafka says."""

    group: str
    brokers: str
    cluster: str
    partitions: list[Partition]
    claims: list[Claimed]
    findings: list[Finding]


class _Unwritten(Register):
    """Tables as a run would leave them; nothing is written."""

    _begun: Mapping[Place, int] | None = None

    def owner(self) -> str:
        value = self._files.read("owner.json")
        return "" if value is None else str(value["id"])

    def starts(self) -> dict[Place, int] | None:
        return super().starts() if self._begun is None else dict(self._begun)

    def start_at(self, offsets: Mapping[Place, int]) -> dict[Place, int]:
        self._begun = offsets
        return dict(offsets)

    def change(self, place: Place, compute: Callable[[Table | None], tuple[Table, T]]) -> T:
        known = self._known.get(place) or self._read(place)
        table, result = compute(known.table)
        self._known[place] = Version(known.number, table, known.at)
        return result

    def prune(self, place: Place) -> None:
        pass


class _Uncommitted(Cluster):
    """A cluster at which nothing is committed."""

    def commit(self, offsets: Mapping[Place, Committed]) -> None:
        pass


class _Opened(NamedTuple):
    cluster: Cluster
    cluster_id: str
    partitions: dict[str, list[int]]
    places: list[Place]


@contextmanager
def _opened(kind: type[Cluster], producer: KafkaOptions, env: ProducerEnv) -> Iterator[_Opened]:
    cluster = kind(producer, env)
    try:
        name, partitions = cluster.metadata()
        yield _Opened(cluster, name, partitions, opening.own_places(partitions, 0, 1))
    finally:
        cluster.close()


def look(producer: KafkaOptions, env: ProducerEnv) -> Group:
    """What there is of a group, and what the next run would say; changes nothing.

    :raises ProducerError: If the cluster cannot be asked.
    """
    with _opened(_Uncommitted, producer, env) as (cluster, cluster_id, partitions, places):
        files = group_files(env.staging, cluster_id, producer.group_id)
        register = _Unwritten(files, env.clock)
        found = cluster.committed(places)
        now = env.clock.now().timestamp()
        shown, claims = [], []
        for place in places:
            table = register.read(place)
            shown.append(_partition(place, table, found.get(place), cluster.ends(place)))
            claims += _claims(place, table, register, now)
        missing = opening.missing_topics(producer, cluster, partitions)
        findings = [Finding("error", text) for text in missing]
        findings += _members(producer, cluster)
        for place in places:
            findings += _findings(producer, env, cluster, partitions, place, files)
        return Group(
            producer.group_id,
            cluster.where.removeprefix("on "),
            cluster_id,
            shown,
            claims,
            list(dict.fromkeys(findings)),
        )


def _partition(
    place: Place, table: Table | None, committed: Committed | None, ends: tuple[int, int]
) -> Partition:
    low, end = ends
    offset = None if committed is None else committed.offset
    base = None if table is None else table.base
    start = offset if base is None else base
    return Partition(
        *place,
        start=low,
        base=base,
        committed=offset,
        end=end,
        lag=None if start is None else max(0, end - max(low, start)),
        claimed=0 if table is None else sum(count(each.ranges) for each in table.claims.values()),
        held=0 if table is None else len(table.held),
        done=0 if table is None else count(table.done),
    )


def _claims(place: Place, table: Table | None, register: Register, now: float) -> list[Claimed]:
    if table is None:
        return []
    live = live_claims(register, table, now)
    made = []
    for generation, claim in table.claims.items():
        files = register.generation(generation)
        owner = files.owner()
        until = max(claim.until, files.deadline() or 0.0)
        made.append(
            Claimed(
                *place,
                generation,
                " ".join(str(owner[name]) for name in ("dag_id", "run_id") if owner.get(name)),
                count(claim.ranges),
                datetime.fromtimestamp(until, timezone.utc).isoformat(timespec="seconds"),
                generation in live,
            )
        )
    return made


def _members(producer: KafkaOptions, cluster: Cluster) -> list[Finding]:
    members = cluster.admin.members(producer.group_id)
    if members is None:
        return [Finding("note", "whether the group has members could not be asked")]
    if not members:
        return []
    shown = ", ".join(members[:3]) + (", …" if len(members) > 3 else "")
    return [
        Finding(
            "error",
            f"the group {producer.group_id!r} has {many(len(members), 'member')} ({shown}): stop"
            " them, or give this pipeline a group_id of its own",
        )
    ]


@contextmanager
def rehearsed(
    producer: KafkaOptions, env: ProducerEnv
) -> Iterator[tuple[Cluster, Register, list[Place]]]:
    """A group as the next run would find it, tables and all; changes nothing.

    :raises ProducerError: As that run.
    """
    with _opened(_Uncommitted, producer, env) as (cluster, cluster_id, partitions, places):
        for text in opening.missing_topics(producer, cluster, partitions):
            raise ProducerError(text)
        register = _Unwritten(group_files(env.staging, cluster_id, producer.group_id), env.clock)
        with _heard(opening.log):
            Opening(producer, cluster, register, env.clock, partitions, places).open()
        yield cluster, register, places


def _findings(
    producer: KafkaOptions,
    env: ProducerEnv,
    cluster: Cluster,
    partitions: Mapping[str, Sequence[int]],
    place: Place,
    files: Any,
) -> list[Finding]:
    """What a run would say of one partition before it receives."""
    register = _Unwritten(files, env.clock)
    with _heard(opening.log) as heard:
        try:
            Opening(producer, cluster, register, env.clock, partitions, [place]).open()
        except ProducerUnavailable:
            raise
        except ProducerError as error:
            heard.append(Finding("error", str(error)))
    return heard


@contextmanager
def _heard(logger: logging.Logger) -> Iterator[list[Finding]]:
    """What is logged meanwhile as a warning or worse; nobody else hears it."""
    heard: list[Finding] = []

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(Finding("warning", record.getMessage()))

    handler = Hearing(logging.WARNING)
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.propagate, logger.level = before


# -- what people do to it --------------------------------------------------------------------------


def adopt(producer: KafkaOptions, env: ProducerEnv) -> list[Place]:
    """Have this staging folder keep the partitions that another keeps; which they were.

    Each begins at its committed offset.  All that is there by now comes marked: the other may have
    handed it out.

    :raises ProducerError: If a run of this folder holds messages of them, or the group has members.
    """
    with _opened(Cluster, producer, env) as (cluster, cluster_id, _, places):
        register = Register(group_files(env.staging, cluster_id, producer.group_id), env.clock)
        owner = register.owner()
        now = env.clock.now().timestamp()
        foreign: dict[Place, tuple[int, int]] = {}
        for place, committed in cluster.committed(places).items():
            mark = read_mark(committed.metadata)
            if mark is None or mark.owner in ("", owner):
                continue
            table = register.read(place)
            if table is not None and live_claims(register, table, now):
                raise ProducerError(
                    f"a run of this staging folder holds messages of {place[0]}-{place[1]}: let it"
                    " end first"
                )
            # What the other's runs have had in hand since its last mark nobody knows.
            foreign[place] = committed.offset, cluster.ends(place)[1]
        # Tables first: while their mark is another's, no run goes by them.
        for place, (offset, highest) in foreign.items():
            register.change(place, lambda t, o=offset, h=highest: (_begun(t, o, h), None))  # type: ignore[misc]
        tables = {place: register.known(place) for place in foreign}
        cluster.commit(
            {
                place: mark_of(table, owner, register.version(place))
                for place, table in tables.items()
                if table is not None
            }
        )
        return list(foreign)


def _begun(table: Table | None, offset: int, highest: int) -> Table:
    """The table that begins at an offset; what was handed out behind it comes marked."""
    return replace(
        table or Table(base=offset),
        base=offset,
        done=(),
        held={},
        claims={},
        marks=((offset, highest),) if offset < highest else (),
    )


def reset(producer: KafkaOptions, env: ProducerEnv) -> None:
    """Have the group begin by ``offset_reset_policy``, once.

    :raises ProducerError: As a run, if nothing may be received; and if a run holds messages.
    """
    once = replace(producer, begin_offset="reset")
    with _opened(Cluster, once, env) as (cluster, cluster_id, partitions, places):
        register = Register(group_files(env.staging, cluster_id, once.group_id), env.clock)
        now = env.clock.now().timestamp()
        for place in places:
            # Before the first is changed: all begin anew, or none does.
            table = register.read(place)
            if table is not None and live_claims(register, table, now):
                raise ProducerError(
                    f"a run holds messages of {place[0]}-{place[1]}: let it end first, or wait"
                    " until its lease is over"
                )
        Opening(once, cluster, register, env.clock, partitions, places).open()
