"""What a settlement came to: the classes of the account, and the class of each action."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

from airflow_broadway.core.custody.verdicts import COMES_AGAIN, Action
from airflow_broadway.core.version import known_fields

#: The classes of the account, each message in one, and what people call them.
CLASSES: Final[Mapping[str, str]] = {
    "acked": "acked",
    "requeued": "requeued",
    "dead_lettered": "dead-lettered",
    "left": "left to the broker",
    "released": "given back",
    "lapsed": "lapsed",
    "settle_failed": "could not be settled",
    "still_leased": "still held",
}

#: The class in which a message is that an action was carried out on.
CLASS_OF: Final[Mapping[Action, str]] = {
    Action.ACK: "acked",
    Action.RETRY: "requeued",
    Action.DEAD_LETTER: "dead_lettered",
    Action.LEAVE: "left",
    Action.RELEASE: "released",
}

#: The counts of a settlement.
_COUNTS: Final = (*CLASS_OF.values(), "lapsed", "failed")
#: The classes of messages that have an outcome.
_HANDLED: Final = ("acked", "requeued", "dead_lettered", "left")


def failures_of(failed: int, totals: Mapping[str, int]) -> int:
    """How many messages failed: what was given back did not, whatever a callback said of it."""
    return min(failed, handled_of(totals))


def handled_of(totals: Mapping[str, int]) -> int:
    """How many messages have an outcome: what was given back or had lapsed has none."""
    return sum(totals.get(name, 0) for name in _HANDLED)


class ComingAgain(NamedTuple):
    """Which messages of a lease are not settled for good: their broker delivers them again.

    :param ids: Their ids; or those of all others, if ``all_but``.
    :param all_but: Whether all come again but ``ids``.
    """

    ids: frozenset[str] = frozenset()
    all_but: bool = False

    @classmethod
    def of(cls, done: Mapping[str, Action], *, whole: bool) -> ComingAgain:
        """By what was done with each message.

        :param whole: Whether these are all that the lease had; if not, the others come again.
        """
        again = frozenset([key for key, action in done.items() if action in COMES_AGAIN])
        if whole and 2 * len(again) <= len(done):
            return cls(again)
        return cls(frozenset(done.keys() - again), all_but=True)

    def has(self, message_id: str) -> bool:
        """Whether a message comes again."""
        return (message_id in self.ids) is not self.all_but

    def but(self, final: Iterable[str]) -> ComingAgain:
        """The same, where these are settled for good besides."""
        ids = self.ids.union(final) if self.all_but else self.ids.difference(final)
        return self._replace(ids=ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleReport:
    """What a settlement did; each message of the lease is in exactly one of the counts.

    :param lapsed: Messages that the lease no longer held: another run has them, or will.
    :param failed: Messages that the broker refused to settle; they come back when the lease lapses.
    :param halted: How many of them nobody takes up before people have looked: their run fails.
        No class of its own.
    :param errors: One sentence per kind of refusal; no secret.
    :param undone: The ids of those counted in ``lapsed`` and ``failed``, by
        :meth:`Custodian.settle_now` alone; its caller tells them apart at once, so that they are
        not part of the JSON.
    :param again: Which messages come again, by :meth:`Custodian.settle` alone, and exactly: not by
        the verdicts that were asked for; those that ``settle_now`` gave back are among them.
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
        """Messages accounted for."""
        return sum(getattr(self, name) for name in _COUNTS)

    @property
    def final(self) -> int:
        """Messages that are settled for good: their broker delivers them no more."""
        return self.acked + self.dead_lettered

    def classes(self, *, still_leased: int = 0) -> dict[str, int]:
        """How many messages are in each of :data:`CLASSES`.

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
        """A JSON value that :meth:`from_json` reads back, but for ``undone``."""
        value = {**asdict(replace(self, again=None)), "errors": list(self.errors)}
        del value["undone"], value["again"]
        if self.again is not None:
            value["again"] = [self.again.all_but, sorted(self.again.ids)]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SettleReport:
        """Read what :meth:`to_json` wrote."""
        errors = tuple(value.get("errors", ()))
        made = cls(**known_fields(cls, {**value, "errors": errors, "again": None}))
        if "again" not in value:
            return made
        all_but, ids = value["again"]
        return replace(made, again=ComingAgain(frozenset(ids), all_but))
