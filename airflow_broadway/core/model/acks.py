"""Acknowledging: who settles a message, and when.

At the end of a stage its messages are settled with one call per (acknowledger, ref).  Broadway
stops at the first acknowledger that raises; here each group is settled independently: the error is
logged, and the other groups are settled all the same.  Broadway acknowledges a message twice when
a callback raises after :meth:`Message.ack_immediately`; here a :class:`Scope` records what a
callback has settled, and the end of the stage skips it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextvars import ContextVar, Token
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

log = logging.getLogger(__name__)


class AckRef(NamedTuple):
    """A message's acknowledger and group; equal (acknowledger, ref) are settled together.

    :param acknowledger: An :class:`Acknowledger`; ``None`` as delivered by a source, until the run
        sets its own.
    :param ref: The grouping key; hashable.
    :param data: Data of the message: its receipt, its ack configuration.
    """

    acknowledger: Any
    ref: Any = None
    data: Any = None


class Settleable(Protocol):
    """The part of a message that acknowledging uses; implemented by :class:`.message.Message`."""

    @property
    def acknowledger(self) -> AckRef: ...

    @property
    def message_id(self) -> str: ...

    @property
    def ok(self) -> bool: ...

    def with_acknowledger(self, acknowledger: AckRef) -> Settleable: ...


M = TypeVar("M", bound=Settleable)


class Acknowledger(Protocol):
    """Settles messages; called once per stage result and ``ack_ref``, never per message.

    An acknowledger may also have ``configure(ack_ref, ack_data, options) -> ack_data`` (then its
    messages may call :meth:`Message.configure_ack`) and ``ack_now(ack_ref, successful, failed)``,
    which :meth:`Message.ack_immediately` prefers to ``ack``.
    """

    def ack(self, ack_ref: Any, successful: list[Any], failed: list[Any]) -> None:
        """Settles the messages ``successful`` and ``failed``; never both empty."""


class NoopAcknowledger:
    """Settles nothing; has no ``configure``."""

    def ack(self, ack_ref: Any, successful: list[Any], failed: list[Any]) -> None:
        return None


#: The acknowledger of a message that has been settled already.
NO_ACK: Final = AckRef(NoopAcknowledger())

#: The messages of one group: (acknowledger, ref, successful, failed).
_Group = tuple[Any, Any, list[Any], list[Any]]


class Scope:
    """One call of a stage: its name, and the messages that its callbacks settled immediately.

    :param stage: ``"process"`` or ``"batch"``; the stage that verdicts report for a failure.
    """

    __slots__ = ("_settled", "_token", "stage")

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._settled: set[tuple[int, Any, str]] = set()
        self._token: Token[Scope | None] | None = None

    def __enter__(self) -> Scope:
        self._token = _scope.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _scope.reset(self._token)

    def remember(self, messages: Iterable[Settleable]) -> None:
        """Records that ``messages`` have been settled."""
        self._settled.update(map(_identity, messages))

    def has_settled(self, message: Settleable) -> bool:
        """Returns whether a callback of this call has settled the message."""
        return bool(self._settled) and _identity(message) in self._settled

    def restored(self, message: M) -> M:
        """Returns the message as it was before a callback that failed.

        It is not settled again if that callback has settled it.
        """
        if self.has_settled(message):
            return cast("M", message.with_acknowledger(NO_ACK))
        return message


_scope: ContextVar[Scope | None] = ContextVar("airflow_broadway_scope", default=None)


def current_stage() -> str:
    """Returns the stage whose callback runs in this thread: ``"process"`` or ``"batch"``."""
    scope = _scope.get()
    return "process" if scope is None else scope.stage


def _identity(message: Settleable) -> tuple[int, Any, str]:
    # The message id is the identity; the rest separates messages that were created without one.
    acknowledger, ref, _ = message.acknowledger
    message_id = message.message_id or f"#{id(message.acknowledger)}"
    return id(acknowledger), ref, message_id


def is_settled(message: Settleable) -> bool:
    """Returns whether it is settled already, as after :meth:`Message.ack_immediately`."""
    return type(message.acknowledger.acknowledger) is NoopAcknowledger


def _group_messages(successful: Iterable[Settleable], failed: Iterable[Settleable]) -> list[_Group]:
    """Groups messages by (acknowledger, ref), in order of each group's first message."""
    groups: dict[tuple[int, Any], _Group] = {}
    last_acknowledger: Any = None
    last_ref: Any = None
    target: list[Any] = []
    for index, messages in ((2, successful), (3, failed)):
        last_acknowledger = None
        for message in messages:
            acknowledger, ref, _ = message.acknowledger
            if acknowledger is not last_acknowledger or ref is not last_ref:
                if type(acknowledger) is NoopAcknowledger:
                    continue
                key = (id(acknowledger), ref)
                group = groups.get(key)
                if group is None:
                    group = groups[key] = (acknowledger, ref, [], [])
                target = group[index]
                last_acknowledger, last_ref = acknowledger, ref
            target.append(message)
    return list(groups.values())


def ack_messages(successful: Iterable[Settleable], failed: Iterable[Settleable]) -> None:
    """Settles a stage's result: one ``ack`` per (acknowledger, ref) that has a message.

    Lists keep the stage's order.  If the acknowledger of a group raises, the error is logged, and
    the others are settled all the same.
    """
    for acknowledger, ref, good, bad in _group_messages(successful, failed):
        try:
            acknowledger.ack(ref, good, bad)
        except Exception as error:
            log.error(
                "acknowledger %s raised for ref %r: its messages stay with their broker until their"
                " lease lapses or is released",
                type(acknowledger).__name__,
                ref,
                exc_info=error,
                extra={"code": "acknowledger_error"},
            )


def ack_messages_or_raise(successful: Iterable[Settleable], failed: Iterable[Settleable]) -> None:
    """Settles a stage's result, for a run that records verdicts: the first error ends the stage.

    An unrecorded failure would later count as a success.
    """
    for acknowledger, ref, good, bad in _group_messages(successful, failed):
        acknowledger.ack(ref, good, bad)


def ack_immediately(messages: Iterable[M]) -> list[M]:
    """Settles messages immediately by their current status, grouped as at the end of a stage.

    An acknowledger's exception propagates to the calling callback; its messages (with those of
    later groups) then fail and are settled at the end of the stage.

    :returns: The messages, with an acknowledger that settles nothing; those that the acknowledger
        leaves to the end of the stage, as they are.
    :raises ValueError: If there is none.
    """
    batch = list(messages)
    if not batch:
        raise ValueError("ack_immediately expects at least one message, got none")
    distinct = {message.message_id or id(message): message for message in batch}.values()
    scope = _scope.get()
    good = [message for message in distinct if message.ok]
    bad = [message for message in distinct if not message.ok]
    left: set[tuple[int, Any, str]] = set()
    for acknowledger, ref, successful, failed in _group_messages(good, bad):
        ack_now = getattr(acknowledger, "ack_now", None) or acknowledger.ack
        ids = deferred_by(ack_now(ref, successful, failed))
        done = [message for message in (*successful, *failed) if message.message_id not in ids]
        left.update(_identity(m) for m in (*successful, *failed) if m.message_id in ids)
        if scope is not None:
            scope.remember(done)
    return [
        message if _identity(message) in left else cast("M", message.with_acknowledger(NO_ACK))
        for message in batch
    ]


def deferred_by(result: object) -> frozenset[str]:
    """Returns the ids of messages that ``ack_now`` left to the end of the stage, by its result."""
    return result if isinstance(result, frozenset) else frozenset()
