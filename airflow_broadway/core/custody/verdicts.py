"""The verdict on a message: a pure function of plain facts, equal in every process.

A verdict may be needed where no message object exists: settling reads the rows of a staged batch.
So :meth:`Producer.verdict`, which has the message, and settling, which has its row, both build the
facts and call :meth:`Producer.judge`; there is no other decision.
"""

from __future__ import annotations

import zlib
from enum import Enum
from typing import Final, NamedTuple

from airflow_broadway.core.model.pipeline_options import RetryPolicy

#: The bytes of a reason that are stored; brokers limit headers.
MAX_REASON: Final = 2048


class Action(str, Enum):
    """An action on a message at its broker."""

    ACK = "ack"
    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    LEAVE = "leave"
    RELEASE = "release"


class Verdict(NamedTuple):
    """The action on one message, and the reason.

    :param action: ``ACK``: removed from the queue.  ``RETRY``: redelivered after ``delay``, uses an
        attempt.  ``DEAD_LETTER``: dead-lettered with ``reason``.  ``LEAVE``: the broker's own rule
        decides (Broadway's ``noop``).  ``RELEASE``: released immediately, uses no attempt.
    :param delay: Seconds until a retry may be redelivered; at least 0.
    :param reason: The failure's reason; cut at :data:`MAX_REASON` bytes where it is stored.
    :param stage: The failed stage: ``"process"``, ``"batch"`` or ``"receive"``.
    :param exception: The type of the exception that failed the message, if any.
    """

    action: Action
    delay: float = 0.0
    reason: str = ""
    stage: str = ""
    exception: str = ""


ACK = Verdict(Action.ACK)
LEAVE = Verdict(Action.LEAVE)
RELEASE = Verdict(Action.RELEASE)


#: Actions after which a broker redelivers the message, blocking those behind it in its group.
COMES_AGAIN: Final = frozenset({Action.RETRY, Action.LEAVE, Action.RELEASE})
#: Actions that become a release behind such a message of their group.
HELD_BACK: Final = frozenset({Action.ACK, Action.RETRY, Action.DEAD_LETTER})


class Facts(NamedTuple):
    """The input of a verdict.

    :param name: The action's name from ``on_success`` or ``on_failure``; the message's own ack
        configuration takes precedence.
    :param attempt: The attempt that has ended, from 1: only recorded failures use an attempt.
    :param redelivered: Whether the message may have been delivered before.  A broker also sets it
        on messages that a run prefetched and released unhandled.
    :param reason: The failure's reason; empty for a success.
    :param stage: The stage: ``"process"`` or ``"batch"``.
    """

    name: str
    attempt: int = 1
    redelivered: bool = False
    reason: str = ""
    stage: str = ""
    message_id: str = ""


def decide(action: Action, facts: Facts, policy: RetryPolicy) -> Verdict:
    """Returns the verdict for ``action``.

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
    """Returns the seconds until the next attempt: jittered by message id, so deterministic."""
    attempt = facts.attempt
    delay = policy.backoff if attempt == 1 else policy.backoff * 2.0 ** min(attempt - 1, 60)
    delay = min(delay, policy.max_backoff)
    if not policy.jitter:
        return delay
    place: float = zlib.crc32(f"{facts.message_id} {attempt}".encode()) / 0xFFFFFFFF
    return delay * (1.0 + policy.jitter * (2.0 * place - 1.0))
