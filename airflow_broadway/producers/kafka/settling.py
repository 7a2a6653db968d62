"""Computes the offset to commit, and the counts, when a claim ends.

This module is pure.  A claim covers a range of offsets.  Some messages have a decision of their
own; the others share one.  An offset without a message is a gap in the log.  The committed offset
advances over the contiguous prefix of settled offsets.  Messages to be redelivered stay in the log,
and offsets that are settled beyond them are recorded in the claim.  Sets of offsets are half-open
ranges, sorted and disjoint.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.report import CLASS_OF, ComingAgain
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, HELD_BACK, Action
from airflow_broadway.core.version import known_fields

Range = tuple[int, int]
Ranges = tuple[Range, ...]

#: One more than Kafka's largest offset.
FOREVER: Final = 1 << 63
_VERSION: Final = 3


# -- claims --------------------------------------------------------------------------------------


class Failed(NamedTuple):
    """A failed message in the log that is to be retried.

    :param attempts: Recorded failures.
    :param not_before: Seconds since the epoch before which it is not due.
    :param group: Its key group, with ``order='key'``.
    """

    attempts: int
    not_before: float = 0.0
    group: str = ""


class Decision(NamedTuple):
    """The verdict on one message.

    :param not_before: Seconds since the epoch before which it is not redelivered.
    :param attempt: The attempt that has ended, from 1.
    :param group: Its key group, with ``order='key'``.
    :param moved: Whether a copy was published to the retry topic or the dead-letter topic.
    """

    action: Action
    not_before: float = 0.0
    attempt: int = 1
    group: str = ""
    message_id: str = ""
    moved: bool = False

    @property
    def stays(self) -> bool:
        """Whether the message is redelivered from its own offset."""
        return self.action in COMES_AGAIN and not self.moved


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The newest recorded state of a partition.

    :param start: The first unsettled offset: the committed offset when the claim was created, or
        the offset last committed if the partition is free.
    :param generation: The generation that holds the partition; ``""``: none.
    :param end: The end of the claimed range, exclusive.
    :param until: The lease deadline when the claim was created.
    :param marked: The end of all earlier claims, exclusive: messages below it are redelivered.
    :param done: Settled offsets beyond ``start``.
    :param failed: Offsets beyond ``start`` of messages to be retried.
    :param settled: The last few generations whose settlement it includes.
    :param topic_id: The topic's id; ``""`` where the broker reports none.
    :param epoch: The leader epoch of the last message read; -1: unknown.
    :param limit: The end offset of a backfill; -1: none.
    """

    start: int
    generation: str = ""
    end: int = 0
    until: float = 0.0
    marked: int = 0
    done: Ranges = ()
    failed: Mapping[int, Failed] = field(default_factory=dict)
    settled: tuple[str, ...] = ()
    topic_id: str = ""
    epoch: int = -1
    limit: int = -1

    @property
    def high(self) -> int:
        """The end of all ranges claimed so far, exclusive."""
        return max(self.marked, self.end)

    def freed(self, **changes: Any) -> Claim:
        """Returns the state of the partition without a holder."""
        return replace(self, generation="", end=0, until=0.0, **changes)

    def to_json(self) -> dict[str, Any]:
        """Serializes the claim as a JSON value for :meth:`from_json`."""
        default = vars(Claim(start=0))
        changed = {name: value for name, value in vars(self).items() if value != default[name]}
        return {"v": _VERSION, **changed}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Claim:
        """Parses the result of :meth:`to_json`.

        :raises ValueError: If the format version is another.
        """
        if value.get("v") != _VERSION:
            raise ValueError(f"format version {value.get('v')!r}; this release reads {_VERSION}")
        failed = {int(offset): Failed(*row) for offset, row in value.get("failed", {}).items()}
        done, settled = normal(value.get("done", ())), tuple(value.get("settled", ()))
        known = {"start": 0, **known_fields(cls, value)}
        return cls(**known | {"failed": failed, "done": done, "settled": settled})


class Read(NamedTuple):
    """The range that a source has read under a claim.

    :param messages: The number of messages delivered to the pipeline; ``None``: unknown.
    :param left: Offsets in the range that were skipped because they are not due.
    """

    start: int
    end: int
    messages: int | None = None
    left: Ranges = ()


class Ended(NamedTuple):
    """The result of ending a claim.

    :param after: The resulting state of the partition; its ``start`` is the offset to commit.
    :param counts: Messages by class of the account, without those settled immediately.
    :param again: The messages to be redelivered, of those with a decision of their own.
    """

    after: Claim
    counts: Mapping[str, int]
    again: ComingAgain


def still_failed(failed: Mapping[int, Failed], again: Mapping[int, Decision]) -> dict[int, Failed]:
    """Returns the messages to be retried, updated by the decisions on redelivered messages.

    A released message keeps its recorded attempts and is due immediately.
    """
    released = {o: message._replace(not_before=0.0) for o, message in failed.items() if o in again}
    retried = {
        offset: Failed(decision.attempt, decision.not_before, decision.group)
        for offset, decision in again.items()
        if decision.action is Action.RETRY
    }
    return {**failed, **released, **retried}


def take_over(claim: Claim, at_once: Mapping[int, Decision]) -> Claim:
    """Returns the state of a partition whose claim belongs to a dead generation.

    :param at_once: Decisions that its callbacks carried out immediately.
    """
    again = {offset: decision for offset, decision in at_once.items() if decision.stays}
    done = union(claim.done, of_offsets(at_once.keys() - again))
    return replace(claim, done=done, failed=still_failed(claim.failed, again))


def keep_order(
    decisions: Mapping[int, Decision], before: Mapping[int, Decision], order: str
) -> dict[int, Decision]:
    """Releases the messages that follow a redelivered message of their group, to preserve order.

    A failed message is released too and uses up no attempt: the failure before it may be the cause.

    :param before: Decisions that were carried out immediately.
    """
    ordered = dict(decisions)
    if order == "none":
        return ordered
    blocked: set[str] = set()
    for offset, decision in sorted({**decisions, **before}.items()):
        group = decision.group if order == "key" else order
        if not group:  # a message without a key is unordered
            continue
        if group in blocked and offset not in before and decision.action in HELD_BACK:
            ordered[offset] = decision._replace(action=Action.RELEASE, not_before=0.0)
        elif decision.action in COMES_AGAIN:
            blocked.add(group)
    return ordered


def end_claim(
    claim: Claim,
    read: Read,
    decisions: Mapping[int, Decision],
    at_once: Mapping[int, Decision],
    others: Action | None,
) -> Ended:
    """Ends a claim.

    :param decisions: Decisions on individual messages.
    :param at_once: Decisions that were carried out immediately.
    :param others: The action for messages without a decision: ``ACK`` or ``RELEASE``; ``None``:
        every message has one, and the other offsets are gaps in the log.
    """
    every = {**decisions, **at_once}
    again = {offset: decision for offset, decision in every.items() if decision.stays}
    covered: Ranges = ((read.start, read.end),) if read.start < read.end else ()
    if others is Action.RELEASE:  # an offset not known to be settled may hold a message
        waits = minus(covered, union(of_offsets(every.keys() - again), claim.done))
    else:
        waits = of_offsets(again)
    waits = union(waits, clip(read.left, read.start, read.end))
    target = waits[0][0] if waits else max(claim.start, read.end)
    beyond = clip(claim.done, max(target, read.end), FOREVER)
    failed = {
        offset: message
        for offset, message in claim.failed.items()
        if offset >= read.end or contains(waits, offset)
    }
    after = claim.freed(
        start=target,
        marked=max(claim.marked, read.end),
        done=union(minus(clip(covered, target, read.end), waits), beyond),
        failed=still_failed(failed, again),
    )
    counts = Counter(CLASS_OF[decision.action] for decision in decisions.values())
    if others is not None:
        offsets = count(minus(covered, claim.done))
        messages = offsets if read.messages is None else read.messages
        counts[CLASS_OF[others]] += max(0, messages - len(every))
    actions = {d.message_id: d.action for d in every.values()}
    redelivered = frozenset(key for key, action in actions.items() if action in COMES_AGAIN)
    coming_again = ComingAgain(redelivered)
    if others is Action.RELEASE:
        coming_again = ComingAgain(frozenset(actions.keys() - redelivered), all_but=True)
    return Ended(after, +counts, coming_again)


# -- sets of offsets -----------------------------------------------------------------------------


def normal(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Sorts ranges, and merges those that touch or overlap."""
    merged: list[Range] = []
    for low, high in sorted((low, high) for low, high in ranges if low < high):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def of_offsets(offsets: Iterable[int]) -> Ranges:
    """Returns the ranges that cover single offsets."""
    return normal((offset, offset + 1) for offset in offsets)


def union(one: Ranges, other: Ranges) -> Ranges:
    """Returns the offsets that are in either set."""
    return normal((*one, *other)) if one and other else one or other


def minus(one: Ranges, other: Ranges) -> Ranges:
    """Returns the offsets that are in the first set only."""
    rest: list[Range] = []
    first, last = 0, len(other)
    for low, high in one:
        while first < last and other[first][1] <= low:
            first += 1
        at = first
        while at < last and other[at][0] < high:
            if low < other[at][0]:
                rest.append((low, other[at][0]))
            low = max(low, other[at][1])
            at += 1
        if low < high:
            rest.append((low, high))
    return tuple(rest)


def clip(ranges: Ranges, low: int, high: int) -> Ranges:
    """Restricts ranges to offsets from ``low`` up to but excluding ``high``."""
    return normal((max(low, a), min(high, b)) for a, b in ranges)


def contains(ranges: Ranges, offset: int) -> bool:
    """Returns whether an offset is in the ranges."""
    index = bisect_right(ranges, (offset, FOREVER))
    return index > 0 and offset < ranges[index - 1][1]


def count(ranges: Ranges) -> int:
    """Counts the offsets in the ranges."""
    return sum(high - low for low, high in ranges)
