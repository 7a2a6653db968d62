"""What a run finds before it receives: each partition's table, or why there is none to go by.

Kafka's offset is a mirror of the table, and says whose mirror it is by the metadata beside it: the
*mark*.  Tables and offsets may disagree, because somebody died between writing the two, because an
operator's tool reset the group, because offsets or messages expired, because the topic was made
anew.  Each of these is told from the others here, and either mended or refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final, NamedTuple

from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kafka.client import Cluster, Committed, Place
from airflow_broadway.producers.kafka.options import KafkaOptions, reset_instant
from airflow_broadway.producers.kafka.ranges import Ranges, count, minus
from airflow_broadway.producers.kafka.register import GRACE_SECONDS, Register
from airflow_broadway.producers.kafka.table import Table, drop, skip

if TYPE_CHECKING:
    from airflow_broadway.core.clock import Clock

__all__ = [
    "Mark",
    "Opening",
    "expired_text",
    "live_claims",
    "mark_of",
    "missing_topics",
    "own_places",
    "read_mark",
    "reset_table",
]

log = logging.getLogger(__name__)

_VERSION: Final = 1


class Mark(NamedTuple):
    """What stands beside an offset that this package committed.

    :param owner: Whose it is; ``""``: of a run without a staging folder.
    :param version: The table's.
    :param highest: The offset behind the last that was handed out.
    """

    owner: str
    version: int
    highest: int


def mark_of(table: Table, owner: str, version: int) -> Committed:
    """What is committed for a table."""
    about = {"b": _VERSION, "o": owner, "s": version, "h": table.highest}
    return Committed(table.base, json.dumps(about, separators=(",", ":")))


def read_mark(metadata: str) -> Mark | None:
    """The mark in an offset's metadata; ``None`` if somebody else committed it."""
    if not metadata.startswith("{"):
        return None
    try:
        value = json.loads(metadata)
        return Mark(str(value["o"]), int(value["s"]), int(value["h"])) if value["b"] else None
    except (ValueError, KeyError, TypeError):
        return None


def own_places(
    partitions: Mapping[str, Sequence[int]], index: int, concurrency: int
) -> list[Place]:
    """The partitions of one of several sources: every so-manieth."""
    places = sorted((topic, number) for topic, found in partitions.items() for number in found)
    return places[index::concurrency]


def missing_topics(
    producer: KafkaOptions, cluster: Cluster, partitions: Mapping[str, Sequence[int]]
) -> list[str]:
    """What people are told of each topic that is not there."""
    return [
        f"the topic {topic!r} does not exist {cluster.where}, or Describe on it is not allowed:"
        " create it, or check the option topics"
        for topic in producer.topics
        if topic not in partitions
    ]


def live_claims(register: Register, table: Table, now: float, *, but: str = "") -> dict[str, float]:
    """Who has a claim on a partition, and until when; without those whose time is over."""
    found: dict[str, float] = {}
    for generation, claim in table.claims.items():
        if generation == but:
            continue
        until = claim.until
        if now >= until + GRACE_SECONDS:
            until = max(until, register.generation(generation).deadline() or 0.0)
        if now < until + GRACE_SECONDS:
            found[generation] = until
    return found


def expired_text(place: Place, gone: Ranges) -> tuple[str, int]:
    """What people are told of messages that retention has removed; and how many they are."""
    lost = count(gone)
    if not lost:
        return "", 0
    one = lost == 1
    text = (
        f"{many(lost, 'message')} of {_name(place)} ({gone[0][0]}–{gone[-1][1] - 1})"
        f" {'was' if one else 'were'} removed by retention before"
        f" {'it was' if one else 'they were'} read: let runs come more often, or the topic keep"
        " messages for longer; on_expired='continue' goes on behind them"
    )
    return text, lost


class Opening:
    """Opens the partitions of one source.

    :param places: Those of this source.
    """

    def __init__(
        self,
        producer: KafkaOptions,
        cluster: Cluster,
        register: Register,
        clock: Clock,
        partitions: Mapping[str, Sequence[int]],
        places: Sequence[Place],
    ) -> None:
        self._producer = producer
        self._cluster = cluster
        self._register = register
        self._clock = clock
        self._all = own_places(partitions, 0, 1)
        self._places = places
        self._owner = register.owner()
        #: Topic → its id, where the cluster gives one.
        self._ids: Mapping[str, str] = {}
        #: Messages that retention removed before anybody read them.
        self.expired = 0

    def open(self) -> None:
        """See that each partition has a table, by which its mirror is right.

        :raises ProducerError: If nothing may be received: the sentence says why, and the way out.
        """
        self._check_dead_letters()
        self._ids = self._cluster.admin.topic_ids(self._producer.topics)
        found = self._cluster.committed(self._all)
        now = self._clock.now().timestamp()
        for place in self._places:
            self._drop_dead(place, now)
            self._open(place, found)
            self._register.prune(place)
        # Of the idle ones too: this proves that the group has no members, and may be written; and
        # it keeps the offsets of an idle partition from expiring.
        self._cluster.commit({place: self._mark(place) for place in self._places})

    def _mark(self, place: Place) -> Committed:
        table = self._table(place)
        return mark_of(table, self._owner, self._register.version(place))

    def _table(self, place: Place) -> Table:
        table = self._register.known(place)
        assert table is not None
        return table

    def _check_dead_letters(self) -> None:
        producer = self._producer
        actions = {producer.actions[producer.on_success], producer.actions[producer.on_failure]}
        if Action.RETRY in actions and producer.retry.dead_letter:
            actions.add(Action.DEAD_LETTER)
        if Action.DEAD_LETTER not in actions:
            return
        topics = sorted({producer.dead_letter_of(each) for each in producer.topics})
        for topic in topics:
            if not self._cluster.has_topic(topic):
                raise ProducerError(
                    f"the dead-letter topic {topic!r} does not exist {self._cluster.where}: create"
                    " it, name another by dead_letter=…, or give the producer"
                    " RetryPolicy(dead_letter=False)"
                )
        for topic, policy in self._cluster.admin.cleanup_policies(topics).items():
            if "compact" in policy:
                raise ProducerError(
                    f"the dead-letter topic {topic!r} {self._cluster.where} is compacted"
                    f" (cleanup.policy={policy}): of all letters with one key it would keep the"
                    " last; set its cleanup.policy to delete, or name another by dead_letter=…"
                )

    # -- one partition -------------------------------------------------------------------------

    def _open(self, place: Place, found: Mapping[Place, Committed]) -> None:
        now = self._clock.now().timestamp()
        low, end = self._cluster.ends(place)
        table = self._register.known(place)
        committed = found.get(place)
        mark = None if committed is None else read_mark(committed.metadata)
        if mark is not None and mark.owner not in ("", self._owner):
            raise ProducerError(
                f"the group {self._producer.group_id!r} is kept by another staging folder or"
                f" another pipeline (mark {mark.owner!r} at {_name(place)}, and here it is"
                f" {self._owner or 'none'!r}): use that staging, another group_id, or"
                " `airflow-broadway kafka adopt`"
            )
        if self._producer.begin_offset == "reset":
            self._begin_anew(place, table, now, low, end)
            table = None
        elif table is None:
            self._begin(place, committed, mark, found, low, end)
        elif committed is None:
            log.warning(
                "The group %r has no offset for %s any more (it expired, or somebody deleted it):"
                " the table in staging stands, at %d.",
                self._producer.group_id,
                _name(place),
                table.base,
            )
        elif mark is not None:
            if committed.offset != table.base:
                log.info(
                    "The offset of %s in Kafka is %d, and the table's %d: written again.",
                    _name(place),
                    committed.offset,
                    table.base,
                )
        elif committed.offset not in (table.base, table.mirrored):
            self._honour_reset(place, table, committed.offset, now)
        self._check_ends(place, low, end)
        self._check_id(place, fresh=table is None)

    def _check_id(self, place: Place, *, fresh: bool) -> None:
        """See that the topic is the one that was read before, where that can be told.

        :param fresh: Whether the partition is begun in this run.
        """
        given = self._ids.get(place[0], "")
        known = self._table(place).topic_id
        if not given or given == known:
            return
        if known and not fresh:
            raise ProducerError(
                f"the topic {place[0]!r} was made anew since the group"
                f" {self._producer.group_id!r} read it: what was finished there says nothing of"
                " what is there now; begin_offset='reset' once starts over"
            )

        def named(table: Table | None) -> tuple[Table, None]:
            assert table is not None
            return replace(table, topic_id=given), None

        self._register.change(place, named)

    def _drop_dead(self, place: Place, now: float) -> None:
        """Take what generations hold whose time is over: it comes again, marked."""
        table = self._register.read(place)
        if table is None:
            return
        dead = table.claims.keys() - live_claims(self._register, table, now).keys()
        if not dead:
            return

        def dropped(table: Table | None) -> tuple[Table, None]:
            assert table is not None
            live = live_claims(self._register, table, now)
            for generation in dead - live.keys():
                table = drop(table, generation)
            return table, None

        self._register.change(place, dropped)
        for generation in sorted(dead):
            log.warning(
                "Generation %s held messages of %s and its lease is over: they come again, marked.",
                generation,
                _name(place),
            )

    def _begin(
        self,
        place: Place,
        committed: Committed | None,
        mark: Mark | None,
        found: Mapping[Place, Committed],
        low: int,
        end: int,
    ) -> None:
        """The first table of a partition."""
        if committed is None:
            start = self._start(place, found)
            base = low if start is None else start
            log.info("%s is read from %d on.", _name(place), base)
            made = Table(base=base)
        else:
            base = committed.offset
            highest = base if mark is None else max(base, min(mark.highest, end))
            log.info(
                "%s is read from %d on, where the group %r is.",
                _name(place),
                base,
                self._producer.group_id,
            )
            made = Table(base=base, marks=((base, highest),) if base < highest else ())
        self._register.change(place, lambda table: (table or made, None))

    def _start(self, place: Place, found: Mapping[Place, Committed]) -> int | None:
        """Where a new group begins in a partition; ``None``: the partition alone is new.

        Of several sources that begin at once, one decides for all partitions.
        """
        register = self._register
        starts = register.starts()
        if starts is None:
            if found or any(register.read(each) is not None for each in self._all):
                return None
            starts = register.start_at(self._by_policy(self._all))
        return starts.get(place)

    def _by_policy(self, places: Sequence[Place]) -> dict[Place, int]:
        """Where ``offset_reset_policy`` begins."""
        policy = self._producer.offset_reset_policy
        instant = reset_instant(policy)
        ends = {place: self._cluster.ends(place) for place in places}
        if instant is None:
            side = 0 if policy == "earliest" else 1
            return {place: both[side] for place, both in ends.items()}
        at = self._cluster.at_instants(places, instant.timestamp())
        # Behind all messages it begins at the end, as Broadway does.
        return {place: offset if offset >= 0 else ends[place][1] for place, offset in at.items()}

    def _begin_anew(
        self, place: Place, table: Table | None, now: float, low: int, end: int
    ) -> None:
        """Begin by the policy, whatever was finished."""
        if table is not None:
            self._refuse_held(place, table, now, "begin_offset='reset'")
        start = self._by_policy([place])[place]
        self._register.change(place, lambda known: (reset_table(known, start, end), None))
        log.warning("%s is read from %d on: begin_offset='reset'.", _name(place), start)

    def _honour_reset(self, place: Place, table: Table, offset: int, now: float) -> None:
        """Go by an offset that somebody else committed."""
        self._refuse_held(place, table, now, f"offsets were reset to {offset}")
        log.warning(
            "The offset of %s in the group %r was reset from %d to %d by somebody else: it is"
            " honoured.",
            _name(place),
            self._producer.group_id,
            table.base,
            offset,
        )
        self._register.change(place, lambda known: (reset_table(known, offset), None))

    def _refuse_held(self, place: Place, table: Table, now: float, what: str) -> None:
        for generation, until in live_claims(self._register, table, now).items():
            if not table.claims[generation].ranges:
                continue
            at = datetime.fromtimestamp(until, timezone.utc).isoformat(timespec="seconds")
            raise ProducerError(
                f"{what} at {_name(place)}, while generation {generation} holds messages of it"
                f" until {at}: let that run end, or wait until then"
            )

    def _check_ends(self, place: Place, low: int, end: int) -> None:
        table = self._table(place)
        if end < table.highest:
            raise ProducerError(
                f"offset {max(table.base, table.highest)} of {_name(place)} is beyond the end"
                f" {end}: the topic was made anew, or lost its tail; begin_offset='reset' once"
                " starts over"
            )
        if low > table.base:
            self._expired(place, table, low)

    def _expired(self, place: Place, table: Table, low: int) -> None:
        text, lost = expired_text(place, minus(((table.base, low),), table.done))
        if lost and self._producer.on_expired == "fail":
            raise ProducerError(text)
        if lost:
            log.error("%s", text)
            self.expired += lost

        def without(known: Table | None) -> tuple[Table, None]:
            assert known is not None
            return skip(known, ((known.base, low),)), None

        for offset in table.held:
            if offset < low:
                log.error("%s-%d was to be tried again, and is gone.", _name(place), offset)

        self._register.change(place, without)


def reset_table(table: Table | None, offset: int, end: int | None = None) -> Table:
    """The table of a group that begins at an offset: what was handed out behind it comes marked."""
    if table is None:
        return Table(base=offset)
    highest = table.highest if end is None else min(end, table.highest)
    return replace(
        table,
        base=offset,
        done=(),
        held={},
        marks=((offset, highest),) if offset < highest else (),
        claims={},
    )


def _name(place: Place) -> str:
    return f"{place[0]}-{place[1]}"
