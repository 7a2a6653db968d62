"""The verdict on a message: a function of plain facts, the same wherever it is asked for.

A message's verdict may be wanted where there is no message object any more: settling reads the rows
of a staged batch.  So :meth:`Producer.verdict`, which has the message, and settling, which has its
row, both name the facts and ask :meth:`Producer.judge`; nothing else decides.
"""

from __future__ import annotations

import zlib
from enum import Enum
from typing import Final, NamedTuple

from airflow_broadway.core.model.pipeline_options import RetryPolicy

#: Bytes of a reason that are kept wherever it is stored; brokers limit headers.
MAX_REASON: Final = 2048


class Action(str, Enum):
    """What is done with a message at its broker."""

    ACK = "ack"
    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    LEAVE = "leave"
    RELEASE = "release"


class Verdict(NamedTuple):
    """What is done with one message, and why.

    :param action: ``ACK``: done with, removed.  ``RETRY``: delivered again after ``delay``, one
        attempt used.  ``DEAD_LETTER``: set aside with ``reason``.  ``LEAVE``: the broker's own rule
        decides (Broadway's ``noop``).  ``RELEASE``: given back at once, no attempt used.
    :param delay: Seconds until a retry may be delivered; at least 0.
    :param reason: Why it failed, for people; cut at :data:`MAX_REASON` bytes where it is stored.
    :param stage: Where it failed: ``"process"``, ``"batch"`` or ``"secure"``.
    """

    action: Action
    delay: float = 0.0
    reason: str = ""
    stage: str = ""


ACK = Verdict(Action.ACK)
LEAVE = Verdict(Action.LEAVE)
RELEASE = Verdict(Action.RELEASE)


#: After these a broker delivers the message again: it holds back those behind it in its group.
COMES_AGAIN: Final = frozenset({Action.RETRY, Action.LEAVE, Action.RELEASE})
#: These become a release behind such a message of their group.
HELD_BACK: Final = frozenset({Action.ACK, Action.RETRY, Action.DEAD_LETTER})


class Facts(NamedTuple):
    """What a verdict goes by.

    :param name: The action as ``on_success`` or ``on_failure`` names it, the message's own first.
    :param attempt: The attempt that has ended, from 1: only recorded failures use one up.
    :param redelivered: Whether the message may have been handed out before.  A broker says so, too,
        of what nobody has handled: what a run prefetched and gave back.
    :param reason: Why it failed; empty for a success.
    :param stage: Where: ``"process"`` or ``"batch"``.
    """

    name: str
    attempt: int = 1
    redelivered: bool = False
    reason: str = ""
    stage: str = ""
    message_id: str = ""


def decide(action: Action, facts: Facts, policy: RetryPolicy) -> Verdict:
    """The verdict that ``action`` means.

    A retry becomes a dead letter, or is left to the broker, once the policy's attempts are used up.
    """
    if action is Action.ACK:
        return ACK
    if action is Action.LEAVE:
        return LEAVE
    if action is Action.RELEASE:
        return RELEASE
    if action is Action.RETRY:
        if facts.attempt < policy.max_attempts:
            return Verdict(action, delay_before(facts, policy), facts.reason, facts.stage)
        if not policy.dead_letter:
            return Verdict(Action.LEAVE, 0.0, facts.reason, facts.stage)
    return Verdict(Action.DEAD_LETTER, 0.0, facts.reason, facts.stage)


def delay_before(facts: Facts, policy: RetryPolicy) -> float:
    """Seconds until the next attempt: spread over messages, and the same whenever it is asked."""
    attempt = facts.attempt
    delay = policy.backoff if attempt == 1 else policy.backoff * 2.0 ** min(attempt - 1, 60)
    delay = min(delay, policy.max_backoff)
    if not policy.jitter:
        return delay
    place: float = zlib.crc32(f"{facts.message_id} {attempt}".encode()) / 0xFFFFFFFF
    return delay * (1.0 + policy.jitter * (2.0 * place - 1.0))
