"""The result of a settlement: the classes of the account, and the class of each action."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action
from airflow_broadway.core.version import known_fields

#: The classes of the account and their labels; each message is in exactly one.
CLASSES: Final[Mapping[str, str]] = {
    "acked": "acked",
    "requeued": "requeued",
    "dead_lettered": "dead-lettered",
    "left": "left to the broker",
    "released": "released",
    "lapsed": "lapsed",
    "settle_failed": "could not be settled",
    "still_leased": "still held",
}

#: The class of a message by the action that was carried out on it.
CLASS_OF: Final[Mapping[Action, str]] = {
    Action.ACK: "acked",
    Action.RETRY: "requeued",
    Action.DEAD_LETTER: "dead_lettered",
    Action.LEAVE: "left",
    Action.RELEASE: "released",
}

#: Counts next to the classes, of pipelines with a sink, each with its text in a report.
APPLIED: Final[Mapping[str, str]] = {
    "already_applied": "acked without being handled: a sink had the rows",
    "duplicates": "acked without being handled: copies of others in the same run",
    "without_identity": "without an identity: a sink may get the rows of a copy too",
}

#: The counts of a settlement.
_COUNTS: Final = (*CLASS_OF.values(), "lapsed", "failed")
#: The classes of messages that have an outcome.
_HANDLED: Final = ("acked", "requeued", "dead_lettered", "left")


def failures_of(failed: int, totals: Mapping[str, int]) -> int:
    """Returns the number of failed messages: a released one has not failed, whatever its status."""
    return min(failed, handled_of(totals))


def handled_of(totals: Mapping[str, int]) -> int:
    """Returns the number of messages with an outcome: released and lapsed ones have none."""
    return sum(totals.get(name, 0) for name in _HANDLED)


class ComingAgain(NamedTuple):
    """The messages of a lease that are not settled for good: the broker redelivers them.

    :param ids: Their ids; or the ids of all others, if ``all_but``.
    :param all_but: Whether all messages except ``ids`` are redelivered.
    """

    ids: frozenset[str] = frozenset()
    all_but: bool = False

    @classmethod
    def of(cls, done: Mapping[str, Action], *, whole: bool) -> ComingAgain:
        """Returns the messages to be redelivered, by the action carried out on each.

        :param whole: Whether ``done`` covers the whole lease; if not, the others are redelivered.
        """
        again = frozenset([key for key, action in done.items() if action in COMES_AGAIN])
        if whole and 2 * len(again) <= len(done):
            return cls(again)
        return cls(frozenset(done.keys() - again), all_but=True)

    def has(self, message_id: str) -> bool:
        """Returns whether a message is redelivered."""
        return (message_id in self.ids) is not self.all_but

    def but(self, final: Iterable[str]) -> ComingAgain:
        """Returns a copy in which the messages ``final`` are settled for good, too."""
        ids = self.ids.union(final) if self.all_but else self.ids.difference(final)
        return self._replace(ids=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleReport:
    """The result of a settlement; each message of the lease is in exactly one of the counts.

    :param lapsed: Messages that the lease no longer held: they are redelivered to another run.
    :param failed: Messages that the broker refused to settle; redelivered when the lease lapses.
    :param halted: How many of them block their queue until an operator intervenes: their run fails.
        No class of its own.
    :param errors: One sentence per kind of refusal; no secret.
    :param undone: The ids of those counted in ``lapsed`` and ``failed``, by
        :meth:`Custodian.settle_now` only; not part of the JSON, since its caller uses them
        immediately.
    :param again: The messages to be redelivered, by :meth:`Custodian.settle` only: the actual
        result, not the requested verdicts.  Includes those that ``settle_now`` released.
    """

    acked: int = 0
    requeued: int = 0
    dead_lettered: int = 0
    left: int = 0
    released: int = 0
    lapsed: int = 0
    failed: int = 0
    halted: int = field(default=0, compare=False)
    errors: tuple[str, ...] = ()
    undone: frozenset[str] = frozenset()
    again: ComingAgain | None = field(default=None, compare=False)

    @property
    def total(self) -> int:
        """The number of messages accounted for."""
        return sum(getattr(self, name) for name in _COUNTS)

    @property
    def final(self) -> int:
        """The number of messages that are settled for good: never redelivered."""
        return self.acked + self.dead_lettered

    def classes(self, *, still_leased: int = 0) -> dict[str, int]:
        """Returns the number of messages in each of :data:`CLASSES`.

        :param still_leased: Messages of leases that are not settled yet.
        """
        counts = {name: getattr(self, name) for name in (*CLASS_OF.values(), "lapsed")}
        return {**counts, "settle_failed": self.failed, "still_leased": still_leased}

    def __add__(self, other: SettleReport) -> SettleReport:
        return SettleReport(
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS},
            halted=self.halted + other.halted,
            errors=tuple(dict.fromkeys(self.errors + other.errors)),
            undone=self.undone | other.undone,
            again=other.again if self.again is None else self.again,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that :meth:`from_json` reads back, without ``undone``."""
        value = {**asdict(replace(self, again=None)), "errors": list(self.errors)}
        del value["undone"], value["again"]
        if self.again is not None:
            value["again"] = [self.again.all_but, sorted(self.again.ids)]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SettleReport:
        """Reads what :meth:`to_json` wrote."""
        errors = tuple(value.get("errors", ()))
        report = cls(**known_fields(cls, {**value, "errors": errors, "again": None}))
        if "again" not in value:
            return report
        all_but, ids = value["again"]
        return replace(report, again=ComingAgain(frozenset(ids), all_but))
