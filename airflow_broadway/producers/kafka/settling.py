"""How a claim ends: from verdicts on messages to the table after them, and to counts.

Pure, as ``table`` is.  There are messages with a decision of their own, and the rest; what is
neither is a gap of the log, and holds no message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.report import CLASS_OF
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, HELD_BACK, Action
from airflow_broadway.producers.kafka.ranges import (
    Ranges,
    contains,
    count,
    intersection,
    minus,
    of_offsets,
    union,
)
from airflow_broadway.producers.kafka.table import Held, Table, advanced

__all__ = [
    "AT_ONCE",
    "Decision",
    "Rest",
    "decided",
    "final_of",
    "settle",
    "settle_now",
    "settled_at_once",
]

#: What stands before a class of the account, in the counts of a settlement, for those messages that
#: callbacks had settled at once.
AT_ONCE: Final = "at once: "
#: Settled generations of which a table remembers the counts.
_KEPT_GENERATIONS: Final = 50
#: Ranges that it remembers of them, in all: of the last one more, if it has more.
_KEPT_RANGES: Final = 10_000


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
    return advanced(_carried_out(made, fresh, name_groups=True)), done


def settle(
    table: Table,
    generation: str,
    decisions: Mapping[int, Decision],
    rest: Rest,
    *,
    order: str,
) -> tuple[Table, dict[str, int]]:
    """End a generation's claim.

    :param decisions: The messages that do not get the verdict of the rest, in any order.
    :returns: The table, and how many messages are in each class of the account; of those that were
        settled at once with :data:`AT_ONCE` before it.
    """
    settled_before = sum(settled_at_once(table, generation).values())
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
    for name, number in settled_at_once(table, generation).items():
        counts[f"{AT_ONCE}{name}"] = number
    offsets = (offset for offset, each in made.items() if each.action not in COMES_AGAIN)
    final = union(union(finished, of_offsets(offsets)), final_of(table.now.get(generation, {})))
    ended = replace(
        table,
        claims={key: each for key, each in table.claims.items() if key != generation},
        done=union(table.done, finished),
        marks=union(table.marks, again),
        now={key: each for key, each in table.now.items() if key != generation},
        past=_last({**table.past, generation: counts}),
        final=_last_ranges({**table.final, generation: final}),
    )
    return advanced(_ready_again(_carried_out(ended, made), again)), counts


def settled_at_once(table: Table, generation: str) -> dict[str, int]:
    """How many messages callbacks of a generation have settled at once, by class of the account."""
    actions = table.now.get(generation, {})
    return {CLASS_OF[Action(name)]: count(ranges) for name, ranges in actions.items()}


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


def final_of(at_once: Mapping[str, Ranges]) -> Ranges:
    """What callbacks have settled for good at once.

    :param at_once: Of one generation: the name of an action → offsets.
    """
    found: Ranges = ()
    for name, ranges in at_once.items():
        if Action(name) not in COMES_AGAIN:
            found = union(found, ranges)
    return found


def _last_ranges(final: Mapping[str, Ranges]) -> dict[str, Ranges]:
    kept: dict[str, Ranges] = {}
    room = _KEPT_RANGES
    for generation, ranges in reversed(list(_last(final).items())):
        room -= len(ranges)
        if kept and room < 0:
            break
        kept[generation] = ranges
    return dict(reversed(list(kept.items())))


def _last(past: Mapping[str, Any]) -> dict[str, Any]:
    return dict(list(past.items())[-_KEPT_GENERATIONS:])


def _latest(now: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """``now`` without dead generations, but for the last of them: who settles late asks for it."""
    dead = [key for key in now if key not in table.claims]
    gone: Collection[str] = set(dead[:-_KEPT_GENERATIONS])
    return {key: each for key, each in now.items() if key not in gone}
