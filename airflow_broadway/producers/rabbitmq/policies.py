"""Policies, and what a queue's arguments come to with them: RabbitMQ's own rules.

Of the users' policies, and of the operators', the one with the highest priority whose pattern
matches applies, alone.  Where it and an argument of the queue set the same limit, the lower one
counts; of all else the argument counts.  https://www.rabbitmq.com/docs/parameters
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Policy", "Setting", "effective"]

#: The limits, of which the lower one counts: milliseconds, messages, bytes, returns.
LIMITS = ("expires", "max-length", "max-length-bytes", "message-ttl", "delivery-limit")
#: The types of queues that a policy may be for, beside all.
_TYPES = {"classic_queues": "classic", "quorum_queues": "quorum", "streams": "stream"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy, or an operator's."""

    name: str
    pattern: str
    apply_to: str
    priority: int
    definition: Mapping[str, Any]
    operator: bool

    @classmethod
    def of(cls, value: Mapping[str, Any], *, operator: bool) -> Policy:
        """One as the management API tells it."""
        priority = value.get("priority", 0)
        return cls(
            name=str(value.get("name", "")),
            pattern=str(value.get("pattern", "")),
            apply_to=str(value.get("apply-to", "all")),
            priority=priority if isinstance(priority, int) else 0,
            definition=dict(value.get("definition") or {}),
            operator=operator,
        )

    @property
    def shown(self) -> str:
        """It, for people."""
        return f"the {'operator ' if self.operator else ''}policy {self.name!r}"

    def matches(self, queue: str, kind: str) -> bool:
        """Whether it is meant for a queue of that name and type."""
        if self.apply_to not in ("all", "queues") and _TYPES.get(self.apply_to) != kind:
            return False
        try:
            return re.search(self.pattern, queue) is not None
        except re.error:  # Erlang's dialect knows more than Python's: rather too many than too few
            return True


class Setting(NamedTuple):
    """What counts for a queue.

    :param by: Who says so, for people.
    """

    value: Any
    by: str


def effective(
    queue: str, kind: str, arguments: Mapping[str, Any], policies: Iterable[Policy]
) -> dict[str, Setting]:
    """What counts for a queue: name without ``x-`` → value and by whom.

    :param kind: ``classic``, ``quorum`` or ``stream``.
    """
    found = {
        name.removeprefix("x-"): Setting(value, "its declaration")
        for name, value in arguments.items()
    }
    known = list(policies)
    for operator in (False, True):
        fitting = [p for p in known if p.operator is operator and p.matches(queue, kind)]
        if not fitting:
            continue
        policy = max(fitting, key=lambda each: each.priority)
        for name, value in policy.definition.items():
            before = found.get(name)
            if before is None or (name in LIMITS and _less(value, before.value)):
                found[name] = Setting(value, policy.shown)
    return found


def _less(value: Any, other: Any) -> bool:
    numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
    return bool(numbers and value < other)
