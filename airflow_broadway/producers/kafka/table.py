"""What is known of one partition, as a value: who holds which offsets, and what is finished.

Kafka keeps one number for a group and a partition.  That says too little: a run may finish offset 7
while 5 is to be tried again and 6 is in the hands of another run.  So a :class:`Table` is kept
beside it, and the number in Kafka is its mirror, :attr:`Table.base`.

=========  =========================================================================================
``base``   all below it is finished
``done``   finished, beyond the base
``claims`` held by a generation
``held``   failed, and to be tried again: how often it has failed, and from when on it may come
``marks``  handed out before, and never finished: comes again as redelivered
``now``    what callbacks settled at once, by generation: the others of its claim are still held
``past``   what settling a generation came to, so that settling it again says the same
``final``  what of a generation was settled for good, for the same reason
=========  =========================================================================================

An offset that is in none of them is free.  Everything here is pure: tables are frozen, and each
function returns a new one.  Instants are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from airflow_broadway.producers.kafka.ranges import (
    FOREVER,
    Ranges,
    contains,
    intersection,
    minus,
    normal,
    union,
)

__all__ = [
    "Claim",
    "Held",
    "Table",
    "advanced",
    "claim",
    "drop",
    "free",
    "skip",
    "unclaim",
]

_VERSION: Final = 2


class Claim(NamedTuple):
    """What a generation holds of the partition.

    :param until: When its lease was to end, as it was known then.
    """

    ranges: Ranges
    until: float


class Held(NamedTuple):
    """A message that is to be tried again.

    :param attempts: Failures on record.
    :param not_before: From when on it may be handed out.
    :param group: What stays in order with it, where that is a key.
    """

    attempts: int
    not_before: float = 0.0
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is known of one partition; see the module.

    :param mirrored: What was in Kafka when it was last known.
    :param epoch: The leader's epoch of the last message that was read; -1: not known.
    :param topic_id: The topic's id; ``""`` where the broker gives none.
    :param limit: Nothing from here on is wanted; -1: the log has no end.
    :param trail: Versions and when they were written, one in a while: what may be removed.
    """

    base: int
    done: Ranges = ()
    claims: Mapping[str, Claim] = field(default_factory=dict)
    held: Mapping[int, Held] = field(default_factory=dict)
    marks: Ranges = ()
    now: Mapping[str, Mapping[str, Ranges]] = field(default_factory=dict)
    past: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    final: Mapping[str, Ranges] = field(default_factory=dict)
    mirrored: int = -1
    epoch: int = -1
    topic_id: str = ""
    limit: int = -1
    trail: tuple[tuple[int, float], ...] = ()

    @property
    def highest(self) -> int:
        """The offset behind the last one that was handed out or finished."""
        ends = [self.base]
        ends += [ranges[-1][1] for ranges in (self.done, self.marks) if ranges]
        ends += [each.ranges[-1][1] for each in self.claims.values() if each.ranges]
        ends += [offset + 1 for offset in self.held]
        return max(ends)

    def marked(self, ranges: Ranges) -> Table:
        """The table with these marked as handed out."""
        return replace(self, marks=union(self.marks, ranges))

    def to_json(self) -> dict[str, Any]:
        """A JSON value that :meth:`from_json` reads back."""
        value: dict[str, Any] = {"v": _VERSION, "base": self.base}
        more = {
            "done": self.done,
            "claims": self.claims,
            "held": {str(offset): held for offset, held in self.held.items()},
            "marks": self.marks,
            "now": self.now,
            "past": self.past,
            "final": self.final,
            "topic_id": self.topic_id,
            "trail": self.trail,
        }
        numbers = {"mirrored": self.mirrored, "limit": self.limit, "epoch": self.epoch}
        value.update({name: each for name, each in more.items() if each})
        value.update({name: each for name, each in numbers.items() if each >= 0})
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Table:
        """Read what :meth:`to_json` wrote.

        :raises ValueError: If a newer release wrote it.
        """
        if value.get("v") != _VERSION:
            raise ValueError(f"format version {value.get('v')!r}; this release reads {_VERSION}")
        given = value.get
        return cls(
            base=value["base"],
            done=_ranges(given("done", ())),
            claims={
                generation: Claim(_ranges(ranges), until)
                for generation, (ranges, until) in given("claims", {}).items()
            },
            held={int(offset): Held(*each) for offset, each in given("held", {}).items()},
            marks=_ranges(given("marks", ())),
            now={
                generation: {action: _ranges(each) for action, each in actions.items()}
                for generation, actions in given("now", {}).items()
            },
            past=given("past", {}),
            final={key: _ranges(each) for key, each in given("final", {}).items()},
            mirrored=given("mirrored", -1),
            epoch=given("epoch", -1),
            topic_id=given("topic_id", ""),
            limit=given("limit", -1),
            trail=tuple((version, at) for version, at in given("trail", ())),
        )


def _ranges(value: Iterable[Iterable[int]]) -> Ranges:
    return tuple((low, high) for low, high in value)


# -- what is free ----------------------------------------------------------------------------------


def free(table: Table, generation: str, now: float, *, order: str) -> Ranges:
    """What a generation may take, in order; the last range has no end.

    Where order counts nobody takes what is behind a message that is not ready, or beside another
    run.  Where it is kept by key that is for each message to say, whose key is not known here.

    :param order: ``"partition"``, ``"key"`` or ``"none"``.
    """
    others = [each for key, each in table.claims.items() if key != generation and each.ranges]
    if order != "none" and others:
        return ()
    taken = [*table.done]
    taken += [each for claimed in table.claims.values() for each in claimed.ranges]
    # What this run has given back it does not receive again.
    taken += [each for ranges in table.now.get(generation, {}).values() for each in ranges]
    waiting = sorted(offset for offset, held in table.held.items() if held.not_before > now)
    end = FOREVER if table.limit < 0 else table.limit
    if order == "partition" and waiting:
        end = min(end, waiting[0])
    taken += [(offset, offset + 1) for offset in waiting]
    return minus(((table.base, end),) if table.base < end else (), normal(taken))


# -- changes ---------------------------------------------------------------------------------------


def claim(
    table: Table, generation: str, wanted: Ranges, now: float, *, until: float, order: str
) -> tuple[Table, Ranges]:
    """Have a generation hold what is free of ``wanted``; the table, and what it was given."""
    given = intersection(wanted, free(table, generation, now, order=order))
    if not given:
        return table, given
    before = table.claims.get(generation)
    ranges = given if before is None else union(before.ranges, given)
    claims = {**table.claims, generation: Claim(ranges, until)}
    return replace(table, claims=claims), given


def skip(table: Table, ranges: Ranges) -> Table:
    """Finish what is free of some ranges, of which it is known that they hold no message."""
    claimed = normal(each for claimed in table.claims.values() for each in claimed.ranges)
    return advanced(replace(table, done=union(table.done, minus(ranges, claimed))))


def unclaim(table: Table, generation: str, ranges: Ranges) -> Table:
    """Take back what was just claimed, and handed out to nobody."""
    claimed = table.claims.get(generation)
    if claimed is None:
        return table
    left = minus(claimed.ranges, ranges)
    claims = {**table.claims, generation: claimed._replace(ranges=left)}
    if not left and generation not in table.now:
        del claims[generation]
    return replace(table, claims=claims)


def drop(table: Table, generation: str) -> Table:
    """Take what a dead generation holds: it comes again, marked."""
    dropped = table.claims.get(generation)
    if dropped is None:
        return table
    claims = {key: each for key, each in table.claims.items() if key != generation}
    return replace(table, claims=claims, marks=union(table.marks, dropped.ranges))


def advanced(table: Table) -> Table:
    """The table with its base moved over what is finished, and without what lies below it."""
    base, done = table.base, table.done
    while done and done[0][0] <= base:
        base = max(base, done[0][1])
        done = done[1:]
    finished = union(((0, base),) if base else (), done)
    held = table.held
    if held:
        held = {offset: each for offset, each in held.items() if not contains(finished, offset)}
    return replace(
        table,
        base=base,
        done=done,
        marks=minus(table.marks, finished),
        held=held,
    )
