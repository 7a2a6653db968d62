"""Decides how a claim ends: from verdicts on messages to the offset that is committed, and counts.

Pure.  A claim covers a range of offsets.  Some have a verdict of their own, the others that of the
rest; an offset without a message is a gap of the log.  The group's offset moves over all that is
finished without a break.  What comes again stays in the log, and what is finished behind it is kept
in the claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from airflow_broadway.core.custody.report import CLASS_OF
from airflow_broadway.core.custody.verdicts import COMES_AGAIN, HELD_BACK, Action
from airflow_broadway.producers.kafka.claims import Claim, Decision, Failed
from airflow_broadway.producers.kafka.offsets import (
    FOREVER,
    Ranges,
    clip,
    contains,
    count,
    minus,
    of_offsets,
    union,
)


class Read(NamedTuple):
    """The range that a source has read under a claim.

    :param messages: How many messages it handed out; ``None``: not known.
    :param left: Offsets in the range that were not handed out, and wait.
    """

    start: int
    end: int
    messages: int | None = None
    left: Ranges = ()


class Rest(NamedTuple):
    """The verdict on messages that have none of their own.

    :param action: ``ACK`` or ``RELEASE``.
    :param named: The messages that the manifest names, where ids were read: offset → decision.
    :param whole: Whether ``named`` are all that were handed out: the others are gaps then.
    """

    action: Action
    named: Mapping[int, Decision] | None = None
    whole: bool = True


class Ended(NamedTuple):
    """A claim that has ended.

    :param after: The partition then; its ``start`` is the offset to commit.
    :param counts: Messages by class of the account, without those settled immediately.
    :param again: Ids of messages that come again; ``None``: all but ``final``.
    :param final: Ids of messages that do not.
    """

    after: Claim
    counts: Mapping[str, int]
    again: frozenset[str] | None
    final: frozenset[str]


def still_failed(failed: Mapping[int, Failed], again: Mapping[int, Decision]) -> dict[int, Failed]:
    """Returns the messages that wait to be retried, after decisions on some.

    One that is released keeps the attempts it has used, and need not wait.
    """
    made = {
        offset: each._replace(not_before=0.0) if offset in again else each
        for offset, each in failed.items()
    }
    return made | {
        offset: Failed(each.attempt, each.not_before, each.group)
        for offset, each in again.items()
        if each.action is Action.RETRY
    }


def taken_over(claim: Claim, at_once: Mapping[int, Decision]) -> tuple[Ranges, dict[int, Failed]]:
    """Returns what is finished, and what waits to be retried, of a claim whose generation is dead.

    :param at_once: What its callbacks had settled immediately.
    """
    stays = {offset: each for offset, each in at_once.items() if each.stays}
    final = of_offsets(offset for offset in at_once if offset not in stays)
    return union(claim.done, final), still_failed(claim.failed, stays)


def in_order(
    decisions: Mapping[int, Decision], before: Mapping[int, Decision], order: str
) -> dict[int, Decision]:
    """Releases what follows a message that comes again in its group, to be handled in order.

    A failed one is released too: it may have failed because the one before it did, and so uses up
    no attempt.

    :param before: Decisions that were carried out immediately.
    """
    made = dict(decisions)
    if order == "none":
        return made
    blocked: set[str] = set()
    for offset, decision in sorted({**decisions, **before}.items()):
        group = decision.group if order == "key" else order
        if not group:  # without a key it is in no order
            continue
        if group in blocked and offset not in before and decision.action in HELD_BACK:
            made[offset] = decision._replace(action=Action.RELEASE, not_before=0.0)
        elif decision.action in COMES_AGAIN:
            blocked.add(group)
    return made


def decided(
    read: Read,
    decisions: Mapping[int, Decision],
    at_once: Mapping[int, Decision],
    rest: Rest,
    *,
    order: str,
) -> dict[int, Decision]:
    """Returns the decision on each message of a range that has one of its own, or is named.

    :param at_once: Decisions that were carried out immediately: they stand.
    """
    named = {
        offset: each._replace(action=rest.action) for offset, each in (rest.named or {}).items()
    }
    made = {
        offset: each
        for offset, each in {**named, **decisions}.items()
        if read.start <= offset < read.end and offset not in at_once
    }
    return in_order(made, at_once, order)


def ended(
    claim: Claim,
    read: Read,
    made: Mapping[int, Decision],
    at_once: Mapping[int, Decision],
    rest: Rest,
) -> Ended:
    """Ends a claim.

    :param made: The result of :func:`decided`.
    """
    every = {**made, **at_once}
    again = {offset: each for offset, each in every.items() if each.stays}
    whole: Ranges = ((read.start, read.end),) if read.start < read.end else ()
    known = rest.action is Action.ACK if rest.named is None else rest.whole
    if known:
        waits = of_offsets(again)
    else:  # what is not known to be finished was handed out, or is a gap
        final = of_offsets(offset for offset in every if offset not in again)
        waits = minus(whole, union(final, claim.done))
    waits = union(waits, clip(read.left, read.start, read.end))
    target = waits[0][0] if waits else max(claim.start, read.end)
    beyond = clip(claim.done, max(target, read.end), FOREVER)
    kept = {
        offset: each
        for offset, each in claim.failed.items()
        if offset >= read.end or contains(waits, offset)
    }
    after = replace(
        claim,
        generation="",
        start=target,
        end=0,
        until=0.0,
        marked=max(claim.marked, read.end),
        done=union(minus(clip(whole, target, read.end), waits), beyond),
        failed=still_failed(kept, again),
    )
    counts = dict.fromkeys(CLASS_OF.values(), 0)
    for decision in made.values():
        counts[CLASS_OF[decision.action]] += 1
    if rest.named is None or not rest.whole:
        offsets = count(minus(whole, claim.done))
        messages = offsets if read.messages is None else read.messages
        others = max(0, messages - len(every))
        counts[CLASS_OF[rest.action] if rest.named is None else "released"] += others
    comes = frozenset(each.message_id for each in every.values() if each.action in COMES_AGAIN)
    return Ended(
        after,
        {name: number for name, number in counts.items() if number},
        comes if known else None,
        frozenset(each.message_id for each in every.values()) - comes,
    )
