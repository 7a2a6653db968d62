"""Claims, and how they end: from verdicts on messages to the offset that is committed, and counts.

Pure.  A claim covers a range of offsets.  Some messages are named with a decision, the others share
one; an offset without a message is a gap of the log.  The group's offset moves over all that is
finished without a break.  What comes again stays in the log, and what is finished behind it is kept
in the claim.  Sets of offsets are ranges: sorted, disjoint, each from its first offset to before
its last.
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

#: Beyond every offset: the largest that Kafka can have, and one more.
FOREVER: Final = 1 << 63
_VERSION: Final = 3


# -- claims --------------------------------------------------------------------------------------


class Failed(NamedTuple):
    """A message that waits in the log to be retried.

    :param attempts: Recorded failures.
    :param not_before: Seconds since the epoch before which it is not handed out.
    :param group: The group in which it keeps its order, where that is a key.
    """

    attempts: int
    not_before: float = 0.0
    group: str = ""


class Decision(NamedTuple):
    """The verdict on one message.

    :param not_before: Seconds since the epoch before which it is not handed out again.
    :param attempt: The attempt that has ended, from 1.
    :param group: The group in which it keeps its order, where that is a key.
    :param moved: Whether a copy was sent to the retry topic, or to the one for dead letters.
    """

    action: Action
    not_before: float = 0.0
    attempt: int = 1
    group: str = ""
    message_id: str = ""
    moved: bool = False

    @property
    def stays(self) -> bool:
        """Whether the message comes again from where it is in the log."""
        return self.action in COMES_AGAIN and not self.moved


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A partition as the newest version describes it.

    :param start: The first offset that is not finished: of a claim, the group's offset when it was
        made; of a partition that nobody holds, the offset as last committed.
    :param generation: The generation that holds the partition; ``""``: none.
    :param end: The offset behind the claimed range.
    :param until: The end of the lease as known when the claim was made.
    :param marked: The offset behind the last that was claimed before: a message below it is
        redelivered.
    :param done: Offsets beyond ``start`` that are finished.
    :param failed: Offsets beyond ``start`` that wait to be retried.
    :param settled: The generations whose settlement is in it, the last few.
    :param topic_id: The topic's id; ``""`` where the broker gives none.
    :param epoch: The leader's epoch of the last message that was read; -1: not known.
    :param limit: The end of a backfill; -1: none.
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
        """The offset behind the last that was ever claimed."""
        return max(self.marked, self.end)

    def freed(self, **changes: Any) -> Claim:
        """Returns the partition once nobody holds it any more."""
        return replace(self, generation="", end=0, until=0.0, **changes)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that :meth:`from_json` reads back."""
        default = vars(Claim(start=0))
        changed = {name: value for name, value in vars(self).items() if value != default[name]}
        return {"v": _VERSION, **changed}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Claim:
        """Reads what :meth:`to_json` wrote.

        :raises ValueError: If another release wrote it.
        """
        if value.get("v") != _VERSION:
            raise ValueError(f"format version {value.get('v')!r}; this release reads {_VERSION}")
        failed = {int(offset): Failed(*row) for offset, row in value.get("failed", {}).items()}
        done, settled = normal(value.get("done", ())), tuple(value.get("settled", ()))
        known = {"start": 0, **known_fields(cls, value)}
        return cls(**known | {"failed": failed, "done": done, "settled": settled})


class Read(NamedTuple):
    """The range that a source has read under a claim.

    :param messages: How many messages it handed out; ``None``: not known.
    :param left: Offsets in the range that were not handed out, and wait.
    """

    start: int
    end: int
    messages: int | None = None
    left: Ranges = ()


class Ended(NamedTuple):
    """A claim that has ended.

    :param after: The partition then; its ``start`` is the offset to commit.
    :param counts: Messages by class of the account, without those settled immediately.
    :param again: Which messages come again, of those that are named, or settled immediately.
    """

    after: Claim
    counts: Mapping[str, int]
    again: ComingAgain


def still_failed(failed: Mapping[int, Failed], again: Mapping[int, Decision]) -> dict[int, Failed]:
    """Returns the messages that wait to be retried, after decisions on some.

    One that is released keeps the attempts it has used, and need not wait.
    """
    released = {o: message._replace(not_before=0.0) for o, message in failed.items() if o in again}
    retried = {
        offset: Failed(decision.attempt, decision.not_before, decision.group)
        for offset, decision in again.items()
        if decision.action is Action.RETRY
    }
    return {**failed, **released, **retried}


def take_over(claim: Claim, at_once: Mapping[int, Decision]) -> Claim:
    """Returns the state of a partition whose claim is of a dead generation.

    :param at_once: What its callbacks had settled immediately.
    """
    again = {offset: decision for offset, decision in at_once.items() if decision.stays}
    done = union(claim.done, of_offsets(at_once.keys() - again))
    return replace(claim, done=done, failed=still_failed(claim.failed, again))


def keep_order(
    decisions: Mapping[int, Decision], before: Mapping[int, Decision], order: str
) -> dict[int, Decision]:
    """Releases what follows a message that comes again in its group, to be handled in order.

    A failed one is released too: it may have failed because the one before it did, and so uses up
    no attempt.

    :param before: Decisions that were carried out immediately.
    """
    ordered = dict(decisions)
    if order == "none":
        return ordered
    blocked: set[str] = set()
    for offset, decision in sorted({**decisions, **before}.items()):
        group = decision.group if order == "key" else order
        if not group:  # without a key it is in no order
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

    :param decisions: Those on messages that are named.
    :param at_once: Those that were carried out immediately.
    :param others: What becomes of messages that are not named: ``ACK`` or ``RELEASE``; ``None``:
        all are named, and the other offsets are gaps of the log.
    """
    every = {**decisions, **at_once}
    again = {offset: decision for offset, decision in every.items() if decision.stays}
    whole: Ranges = ((read.start, read.end),) if read.start < read.end else ()
    if others is Action.RELEASE:  # what is not known to be finished was handed out, or is a gap
        waits = minus(whole, union(of_offsets(every.keys() - again), claim.done))
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
        done=union(minus(clip(whole, target, read.end), waits), beyond),
        failed=still_failed(failed, again),
    )
    counts = Counter(CLASS_OF[decision.action] for decision in decisions.values())
    if others is not None:
        offsets = count(minus(whole, claim.done))
        messages = offsets if read.messages is None else read.messages
        counts[CLASS_OF[others]] += max(0, messages - len(every))
    named = {d.message_id: d.action for d in every.values()}
    comes = frozenset(key for key, action in named.items() if action in COMES_AGAIN)
    known = ComingAgain(comes)
    if others is Action.RELEASE:
        known = ComingAgain(frozenset(named.keys() - comes), all_but=True)
    return Ended(after, +counts, known)


# -- sets of offsets -----------------------------------------------------------------------------


def normal(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Sorts ranges, and merges those that touch or overlap."""
    made: list[Range] = []
    for low, high in sorted((low, high) for low, high in ranges if low < high):
        if made and low <= made[-1][1]:
            made[-1] = (made[-1][0], max(high, made[-1][1]))
        else:
            made.append((low, high))
    return tuple(made)


def of_offsets(offsets: Iterable[int]) -> Ranges:
    """Returns the ranges of single offsets."""
    return normal((offset, offset + 1) for offset in offsets)


def union(one: Ranges, other: Ranges) -> Ranges:
    """Returns the offsets that are in either."""
    return normal((*one, *other)) if one and other else one or other


def minus(one: Ranges, other: Ranges) -> Ranges:
    """Returns the offsets that are in the first alone."""
    made: list[Range] = []
    place, last = 0, len(other)
    for low, high in one:
        while place < last and other[place][1] <= low:
            place += 1
        at = place
        while at < last and other[at][0] < high:
            if low < other[at][0]:
                made.append((low, other[at][0]))
            low = max(low, other[at][1])
            at += 1
        if low < high:
            made.append((low, high))
    return tuple(made)


def clip(ranges: Ranges, low: int, high: int) -> Ranges:
    """Returns the offsets from ``low`` to before ``high``."""
    return normal((max(low, a), min(high, b)) for a, b in ranges)


def contains(ranges: Ranges, offset: int) -> bool:
    """Whether an offset is among them."""
    place = bisect_right(ranges, (offset, FOREVER))
    return place > 0 and offset < ranges[place - 1][1]


def count(ranges: Ranges) -> int:
    """Counts offsets."""
    return sum(high - low for low, high in ranges)
