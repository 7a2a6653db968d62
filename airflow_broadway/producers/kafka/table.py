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
``crashes``  what was in hand when a process died, and how often
=========  =========================================================================================

An offset that is in none of them is free.  Everything here is pure: tables are frozen, and each
function returns a new one.  Instants are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.report import CLASS_OF
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, HELD_BACK, Action
from airflow_broadway.producers.kafka.ranges import (
    FOREVER,
    Range,
    Ranges,
    contains,
    count,
    intersection,
    minus,
    normal,
    of_offsets,
    union,
)

__all__ = [
    "AT_ONCE",
    "Claim",
    "Crash",
    "Decision",
    "Held",
    "Rest",
    "Table",
    "blame",
    "claim",
    "decided",
    "drop",
    "free",
    "settle",
    "settle_now",
    "skip",
    "suspects",
    "unclaim",
]

_VERSION: Final = 1
#: What stands before a class of the account, in the counts of a settlement, for those messages that
#: callbacks had settled at once.
AT_ONCE: Final = "at once: "
#: Settled generations of which a table remembers the counts.
_KEPT_GENERATIONS: Final = 50


class Claim(NamedTuple):
    """What a generation holds of the partition.

    :param last: What it claimed last: a message in there was the last to be handed out.
    :param until: When its lease was to end, as it was known then.
    :param at: When it claimed last.
    """

    ranges: Ranges
    last: Range
    until: float
    at: float = 0.0


class Held(NamedTuple):
    """A message that is to be tried again.

    :param attempts: Failures on record.
    :param not_before: From when on it may be handed out.
    :param group: What stays in order with it, where that is a key.
    """

    attempts: int
    not_before: float = 0.0
    group: str = ""


class Decision(NamedTuple):
    """What becomes of one message.

    :param not_before: From when on it may be handed out again.
    :param attempt: The attempt that has ended, from 1.
    :param group: What stays in order with it, where that is a key.
    """

    action: Action
    not_before: float = 0.0
    attempt: int = 1
    group: str = ""


class Rest(NamedTuple):
    """What becomes of those messages of a claim on which there is no single decision.

    :param action: ``ACK`` or ``RELEASE``.
    :param read: What the source has handed out, gaps of the log included; ``None``: nobody knows.
    :param messages: How many messages there are in ``read``; ``None``: nobody knows.
    :param named: The messages that the manifest names, with their groups, where ids were read.
    :param whole: Whether ``named`` are all messages in ``read``: then the others are gaps.
    """

    action: Action
    read: Ranges | None = None
    messages: int | None = None
    named: Mapping[int, str] | None = None
    whole: bool = True


class Crash(NamedTuple):
    """What was in hand when processes died.

    :param times: How many processes.
    :param alone: Whether the last of them had claimed nothing beside it: one message, then.
    """

    low: int
    high: int
    times: int
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """What is known of one partition; see the module.

    :param mirrored: What was in Kafka when it was last known.
    :param epoch: The leader's epoch of the last message that was read; -1: not known.
    :param topic_id: The topic's id; ``""`` where the broker gives none.
    :param skipped: Whether a run that ended early did not come to try what may have crashed others.
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
    crashes: tuple[Crash, ...] = ()
    mirrored: int = -1
    epoch: int = -1
    topic_id: str = ""
    skipped: bool = False
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
            "crashes": self.crashes,
            "topic_id": self.topic_id,
            "skipped": self.skipped,
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
                generation: Claim(_ranges(ranges), (last[0], last[1]), until, at)
                for generation, (ranges, last, until, at) in given("claims", {}).items()
            },
            held={int(offset): Held(*each) for offset, each in given("held", {}).items()},
            marks=_ranges(given("marks", ())),
            now={
                generation: {action: _ranges(each) for action, each in actions.items()}
                for generation, actions in given("now", {}).items()
            },
            past=given("past", {}),
            crashes=tuple(Crash(*each) for each in given("crashes", ())),
            mirrored=given("mirrored", -1),
            epoch=given("epoch", -1),
            topic_id=given("topic_id", ""),
            skipped=given("skipped", False),
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


def suspects(table: Table, wanted: Ranges, *, least: int) -> list[Crash]:
    """What of ``wanted`` was in hand in at least so many crashes."""
    return [
        each._replace(low=low, high=high)
        for each in table.crashes
        if each.times >= least
        for low, high in intersection(wanted, ((each.low, each.high),))
    ]


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
    claims = {**table.claims, generation: Claim(ranges, (given[0][0], given[-1][1]), until, now)}
    return replace(table, claims=claims), given


def skip(table: Table, ranges: Ranges) -> Table:
    """Finish what is free of some ranges, of which it is known that they hold no message."""
    claimed = normal(each for claimed in table.claims.values() for each in claimed.ranges)
    return _advanced(replace(table, done=union(table.done, minus(ranges, claimed))))


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


def drop(table: Table, generation: str, *, crashed: bool) -> Table:
    """Take what a dead generation holds: it comes again, marked.

    :param crashed: Whether its process died at work: then what it claimed last is suspect.
    """
    dropped = table.claims.get(generation)
    if dropped is None:
        return table
    claims = {key: each for key, each in table.claims.items() if key != generation}
    made = replace(table, claims=claims, marks=union(table.marks, dropped.ranges))
    return blame(made, dropped.last) if crashed else made


def blame(table: Table, last: Range) -> Table:
    """Count one more crash for what was claimed last, and is not finished."""
    low, high = last
    alone = high - low == 1
    made: list[Crash] = []
    for each in table.crashes:
        made += [each._replace(low=a, high=b) for a, b in minus(((each.low, each.high),), (last,))]
        made += [
            Crash(a, b, each.times + 1, alone)
            for a, b in intersection(((each.low, each.high),), (last,))
        ]
    known = normal((each.low, each.high) for each in table.crashes)
    made += [Crash(a, b, 1, alone) for a, b in minus((last,), known)]
    return replace(table, crashes=tuple(sorted(made)))


def settle_now(
    table: Table, generation: str, decisions: Mapping[int, Decision], *, order: str
) -> tuple[Table, dict[int, Action]]:
    """Settle some messages of a claim, and keep the others.

    :returns: The table, and what was done by now: of messages that were settled so before, too.
    """
    claimed = table.claims.get(generation)
    before = {Action(action): ranges for action, ranges in table.now.get(generation, {}).items()}
    held = () if claimed is None else claimed.ranges
    done: dict[int, Action] = {}
    fresh: dict[int, Decision] = {}
    if order != "none":
        ours = {offset: each for offset, each in decisions.items() if contains(held, offset)}
        ours, _ = _in_order(ours, {}, Action.ACK, _come_again(table, generation), order)
        decisions = {**decisions, **ours}
    for offset, decision in decisions.items():
        earlier = next((a for a, ranges in before.items() if contains(ranges, offset)), None)
        if earlier is not None:
            done[offset] = earlier
        elif contains(held, offset):
            done[offset] = decision.action
            fresh[offset] = decision
    if not fresh or claimed is None:
        return table, done
    settled = of_offsets(fresh)
    kept = claimed._replace(ranges=minus(claimed.ranges, settled))
    actions = dict(table.now.get(generation, {}))
    for offset, decision in fresh.items():
        name = decision.action.value
        actions[name] = union(actions.get(name, ()), ((offset, offset + 1),))
    made = replace(
        table,
        claims={**table.claims, generation: kept},
        now=_latest({**table.now, generation: actions}, table),
    )
    return _advanced(_carried_out(made, fresh, name_groups=True)), done


def settle(
    table: Table,
    generation: str,
    decisions: Mapping[int, Decision],
    rest: Rest,
    *,
    order: str,
    crashed: bool = False,
) -> tuple[Table, dict[str, int]]:
    """End a generation's claim.

    :param decisions: The messages that do not get the verdict of the rest, in any order.
    :param crashed: Whether its process died at work, and nobody knows what it handed out.
    :returns: The table, and how many messages are in each class of the account; of those that were
        settled at once with :data:`AT_ONCE` before it.
    """
    claimed = table.claims[generation]
    at_once = table.now.get(generation, {})
    settled_before = sum(map(count, at_once.values()))
    read, made, others = _decided(table, generation, decisions, rest, order)
    single = of_offsets(made)
    remaining = minus(read, single)
    finished: Ranges = ()
    again: Ranges = ()
    if rest.named is None:
        total = count(read) if rest.messages is None else rest.messages - settled_before
        left = max(0, total - len(made))
        if rest.action is Action.ACK:
            finished = remaining
        else:
            again = remaining
    else:
        left = len(others)
        again = of_offsets(others) if rest.action is not Action.ACK else ()
        gaps = minus(remaining, again)
        if rest.whole:
            finished = gaps
        elif rest.action is Action.ACK:
            finished = of_offsets(others)
            again = minus(gaps, finished)
        else:
            again = remaining
    counts = dict.fromkeys(CLASS_OF.values(), 0)
    counts[CLASS_OF[rest.action]] += left
    for decision in made.values():
        counts[CLASS_OF[decision.action]] += 1
    if rest.named is not None and not rest.whole and rest.messages is not None:
        # Read, and in no manifest: never handled, and given back.
        counts["released"] += max(0, rest.messages - settled_before - len(others) - len(made))
    counts = {name: number for name, number in counts.items() if number}
    for name, ranges in at_once.items():
        counts[f"{AT_ONCE}{CLASS_OF[Action(name)]}"] = count(ranges)
    ended = replace(
        table,
        claims={key: each for key, each in table.claims.items() if key != generation},
        done=union(table.done, finished),
        marks=union(table.marks, again),
        now={key: each for key, each in table.now.items() if key != generation},
        past=_last({**table.past, generation: counts}),
    )
    ended = _ready_again(_carried_out(ended, made), again)
    if crashed:
        ended = blame(ended, claimed.last)
    return _advanced(ended), counts


def decided(
    table: Table, generation: str, decisions: Mapping[int, Decision], rest: Rest, *, order: str
) -> dict[int, Decision]:
    """The single decisions that :func:`settle` carries out: those that order asks for, too."""
    return _decided(table, generation, decisions, rest, order)[1]


def _decided(
    table: Table, generation: str, decisions: Mapping[int, Decision], rest: Rest, order: str
) -> tuple[Ranges, dict[int, Decision], dict[int, str]]:
    """What was read, the single decisions on it, and the messages that get the rest's."""
    claimed = table.claims[generation].ranges
    read = claimed if rest.read is None else intersection(claimed, rest.read)
    made = {offset: each for offset, each in decisions.items() if contains(read, offset)}
    others = {
        offset: group
        for offset, group in (rest.named or {}).items()
        if offset not in made and contains(read, offset)
    }
    if order != "none":
        before = _come_again(table, generation)
        made, others = _in_order(made, others, rest.action, before, order)
    return read, made, others


def _in_order(
    made: dict[int, Decision],
    others: dict[int, str],
    rest: Action,
    before: Mapping[int, str],
    order: str,
) -> tuple[dict[int, Decision], dict[int, str]]:
    """What follows a message that comes again, in its group, is given back: to be handled in order.

    What failed is given back too: it may have failed because the one before it did, and so uses up
    no attempt.

    :param before: What callbacks have given back by now, and its group.
    """
    by_key = order == "key"
    blocked: set[str] = set()
    result = dict(made)
    left = dict(others)
    steps: list[tuple[int, str, Action | None]] = [
        (offset, group, None) for offset, group in before.items()
    ]
    steps += [(offset, each.group, each.action) for offset, each in made.items()]
    steps += [(offset, group, rest) for offset, group in others.items()]
    for offset, key, action in sorted(steps, key=lambda each: each[0]):
        group = key if by_key else ""
        if by_key and not key:  # without a key it is in no order
            continue
        if action is None:
            blocked.add(group)
        elif group in blocked and action in HELD_BACK:
            left.pop(offset, None)
            result[offset] = Decision(Action.RELEASE, group=key)
        elif action in COMES_AGAIN:
            blocked.add(group)
    return result, left


def _come_again(table: Table, generation: str) -> dict[int, str]:
    """What callbacks of a generation have given back at once, and its group."""
    found: dict[int, str] = {}
    for name, ranges in table.now.get(generation, {}).items():
        if Action(name) in COMES_AGAIN:
            for low, high in ranges:
                for offset in range(low, high):
                    held = table.held.get(offset)
                    found[offset] = "" if held is None else held.group
    return found


def _carried_out(
    table: Table, decisions: Mapping[int, Decision], *, name_groups: bool = False
) -> Table:
    """The table after some decisions, but for the claim that they were on.

    :param name_groups: Whether to note the group of what was given back: what is behind it, and
        settled later, waits for it.
    """
    if not decisions:
        return table
    held = dict(table.held)
    finished: list[int] = []
    again: list[int] = []
    for offset, decision in decisions.items():
        if decision.action is Action.RETRY:
            held[offset] = Held(decision.attempt, decision.not_before, decision.group)
        elif decision.action in COMES_AGAIN:
            again.append(offset)
            if offset in held:  # it keeps the attempts it has used
                held[offset] = held[offset]._replace(not_before=0.0)
            elif decision.group and name_groups:
                held[offset] = Held(0, 0.0, decision.group)
        else:
            finished.append(offset)
    return replace(
        table,
        held=held,
        done=union(table.done, of_offsets(finished)),
        marks=union(table.marks, of_offsets(again)),
    )


def _ready_again(table: Table, again: Ranges) -> Table:
    """What was given back may be handed out at once, with the attempts that it has used."""
    if not table.held or not again:
        return table
    held = {
        offset: each._replace(not_before=0.0) if contains(again, offset) else each
        for offset, each in table.held.items()
    }
    return replace(table, held=held)


def _advanced(table: Table) -> Table:
    """The table with its base moved over what is finished, and without what lies below it."""
    base, done = table.base, table.done
    while done and done[0][0] <= base:
        base = max(base, done[0][1])
        done = done[1:]
    finished = union(((0, base),) if base else (), done)
    held = table.held
    if held:
        held = {offset: each for offset, each in held.items() if not contains(finished, offset)}
    crashes = tuple(
        each._replace(low=low, high=high)
        for each in table.crashes
        for low, high in minus(((each.low, each.high),), finished)
    )
    return replace(
        table,
        base=base,
        done=done,
        marks=minus(table.marks, finished),
        held=held,
        crashes=crashes,
    )


def _last(past: Mapping[str, Any]) -> dict[str, Any]:
    return dict(list(past.items())[-_KEPT_GENERATIONS:])


def _latest(now: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """``now`` without dead generations, but for the last of them: who settles late asks for it."""
    dead = [key for key in now if key not in table.claims]
    gone: Collection[str] = set(dead[:-_KEPT_GENERATIONS])
    return {key: each for key, each in now.items() if key not in gone}
