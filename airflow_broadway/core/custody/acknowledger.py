"""Acknowledging: one call per (acknowledger, ref) and stage result, and each group on its own.

Where Broadway stops at the first acknowledger that raises, here the groups are isolated: the error
is logged and the other groups are settled all the same.  And where Broadway acknowledges a message
twice when a callback raises after :meth:`Message.ack_immediately`, here a :class:`Scope` remembers
what a callback has settled, and the end of the stage leaves it alone.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from typing import Any, Protocol

from airflow_broadway.core.custody.producer import Producer
from airflow_broadway.core.custody.protocol import ACK, Action, Delivery, Verdict
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.message import NO_ACK, Message, NoopAcknowledger

__all__ = [
    "AckSink",
    "RunAcknowledger",
    "Scope",
    "ack_messages",
    "ack_messages_now",
    "ack_messages_or_raise",
    "is_settled",
]

log = logging.getLogger(__name__)

#: Called with the acknowledger, the ref and the exception of a group that could not be settled.
OnError = Callable[[Any, Any, Exception], None]

#: The messages of one group: (acknowledger, ref, successful, failed).
_Group = tuple[Any, Any, list[Message], list[Message]]


class Scope:
    """One call of a stage: names it, and remembers what its callbacks settled at once.

    :param stage: ``"process"`` or ``"batch"``; what verdicts say of where a message failed.
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

    def remember(self, messages: Iterable[Message]) -> None:
        """Note that ``messages`` have been settled."""
        self._settled.update(map(_identity, messages))

    def has_settled(self, message: Message) -> bool:
        """Whether a callback of this call has settled the message."""
        return bool(self._settled) and _identity(message) in self._settled

    def restored(self, message: Message) -> Message:
        """The message as it was before a callback that failed.

        If that callback settled it, nobody settles it again.
        """
        if self._settled and _identity(message) in self._settled:
            return message.with_acknowledger(NO_ACK)
        return message


_scope: ContextVar[Scope | None] = ContextVar("airflow_broadway_scope", default=None)


def current_stage() -> str:
    """The stage whose callback runs in this thread: ``"process"`` or ``"batch"``."""
    scope = _scope.get()
    return "process" if scope is None else scope.stage


def _identity(message: Message) -> tuple[int, Any, str]:
    # The id alone names a message; the rest keeps apart messages that were made without one.
    acknowledger, ref, _ = message.acknowledger
    message_id = message.message_id or f"#{id(message.acknowledger)}"
    return id(acknowledger), ref, message_id


def is_settled(message: Message) -> bool:
    """Whether nobody is to settle it any more, as after :meth:`Message.ack_immediately`."""
    return type(message.acknowledger.acknowledger) is NoopAcknowledger


def _groups(successful: Iterable[Message], failed: Iterable[Message]) -> list[_Group]:
    """The messages by (acknowledger, ref), in order of each group's first message."""
    groups: dict[tuple[int, Any], _Group] = {}
    last_acknowledger: Any = None
    last_ref: Any = None
    target: list[Message] = []
    for place, messages in ((2, successful), (3, failed)):
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
                target = group[place]
                last_acknowledger, last_ref = acknowledger, ref
            target.append(message)
    return list(groups.values())


def _log_error(acknowledger: Any, ref: Any, error: Exception) -> None:
    log.error(
        "acknowledger %s raised for ref %r: its messages stay with their broker until their lease"
        " lapses or is released",
        type(acknowledger).__name__,
        ref,
        exc_info=error,
        extra={"code": "acknowledger_error"},
    )


def ack_messages(
    successful: Iterable[Message],
    failed: Iterable[Message],
    on_error: OnError = _log_error,
) -> None:
    """Settle a stage's result: one ``ack`` per (acknowledger, ref) that has a message.

    Lists keep the stage's order; a group whose acknowledger raises is reported to ``on_error``, and
    the others are settled all the same.
    """
    for acknowledger, ref, good, bad in _groups(successful, failed):
        try:
            acknowledger.ack(ref, good, bad)
        except Exception as error:
            on_error(acknowledger, ref, error)


def ack_messages_or_raise(successful: Iterable[Message], failed: Iterable[Message]) -> None:
    """The same for a run that records verdicts: one that cannot be recorded ends the stage.

    A failure without its record would else be taken for a success later on.
    """

    def fail(acknowledger: Any, ref: Any, error: Exception) -> None:
        raise error

    ack_messages(successful, failed, fail)


def ack_messages_now(messages: Iterable[Message]) -> None:
    """Settle ``messages`` at once by their status, through ``ack_now`` where there is one.

    Not protected: an acknowledger's exception goes to the callback that asked, and its messages
    (with those of the groups after it) then fail and are settled at the end of the stage.
    """
    given = list({message.message_id or id(message): message for message in messages}.values())
    scope = _scope.get()
    good = [message for message in given if message.status.kind == "ok"]
    bad = [message for message in given if message.status.kind != "ok"]
    for acknowledger, ref, successful, failed in _groups(good, bad):
        ack_now = getattr(acknowledger, "ack_now", None) or acknowledger.ack
        ack_now(ref, successful, failed)
        if scope is not None:
            scope.remember(successful)
            scope.remember(failed)


#: A message and what is to be done with it.
Judged = tuple[Message, Verdict]


class AckSink(Protocol):
    """Where a run keeps its verdicts; called from whichever thread settles, one at a time."""

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Take the verdicts of one stage result."""
        ...

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        """Carry out these verdicts before returning; raises if the broker does."""
        ...


class RunAcknowledger:
    """The acknowledger of real custody: asks the producer for each verdict, gives it to the run.

    :param producer: Decides by the message's own configuration, its attempt and the retry policy.
    :param sink: Keeps verdicts until they are carried out.
    """

    def __init__(self, producer: Producer, sink: AckSink) -> None:
        self._producer = producer
        self._sink = sink
        self._lock = threading.Lock()
        # What nearly every message gets, so that it need not be asked for each.
        self._plain = ACK if producer.actions[producer.on_success] is Action.ACK else None

    def configure(self, ack_ref: Any, ack_data: Any, options: Mapping[str, Any]) -> Delivery:
        """Set ``on_success`` and ``on_failure`` for one message.

        :raises OptionsError: If an option is unknown, or its value is no action of the producer.
        """
        checked: dict[str, str] = {}
        for name, value in options.items():
            path = f"configure_ack.{name}"
            if name not in ("on_success", "on_failure"):
                raise OptionsError.unknown(path, value, ("on_failure", "on_success"))
            checked[name] = self._producer.check_action(name, value, path)
        data = ack_data if isinstance(ack_data, Delivery) else Delivery()
        return dataclasses.replace(data, **checked)  # type: ignore[arg-type]

    def ack(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        """Record the verdicts on one stage's messages."""
        self._give(self._sink.record, successful, failed)

    def ack_now(self, ack_ref: Any, successful: list[Message], failed: list[Message]) -> None:
        """Carry the verdicts out before returning."""
        self._give(self._sink.settle_now, successful, failed)

    def _give(
        self,
        take: Callable[[str, list[Judged], list[Judged]], None],
        successful: list[Message],
        failed: list[Message],
    ) -> None:
        stage, verdict = current_stage(), self._producer.verdict
        good: list[Judged] = []
        for message in successful:
            data = message.acknowledger.data
            if self._plain is not None and (type(data) is not Delivery or data.on_success is None):
                good.append((message, self._plain))
            else:
                good.append((message, verdict(message, failed=False, stage=stage)))
        bad = [(message, verdict(message, failed=True, stage=stage)) for message in failed]
        with self._lock:
            take(stage, good, bad)
