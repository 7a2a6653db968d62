"""Decides how a claim ends: from verdicts on messages to the offset that is committed, and counts.

Pure.  A claim covers a range of offsets.  Some messages are named with a decision, the others share
one; an offset without a message is a gap of the log.  The group's offset moves over all that is
finished without a break.  What comes again stays in the log, and what is finished behind it is kept
in the claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from airflow_broadway.core.custody.report import CLASS_OF, ComingAgain
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
