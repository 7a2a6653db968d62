"""Policies, and what applies to a queue with them: https://www.rabbitmq.com/docs/parameters.

Among the users' policies whose pattern matches the queue, the one with the highest priority
applies, alone; so among the operators'.  Where a policy and an argument of the queue set the same
limit, the lower one applies; in all else, the argument.

A pattern can be written so that matching it takes for ever.  So all but the plainest patterns are
matched in a process of its own, which is ended when it takes too long.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: The limits, of which the lower one counts: milliseconds, messages, bytes, returns.
LIMITS = ("expires", "max-length", "max-length-bytes", "message-ttl", "delivery-limit")
#: The types of queues that a policy may be for, beside all.
_TYPES = {"classic_queues": "classic", "quorum_queues": "quorum", "streams": "stream"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy, or an operator's.

    :param queues: The queues whose names its pattern matches, where :func:`matched` found that out.
    """

    name: str
    pattern: str
    apply_to: str
    priority: int
    definition: Mapping[str, Any]
    operator: bool
    queues: frozenset[str] | None = None

    @classmethod
    def of(cls, value: Mapping[str, Any], *, operator: bool) -> Policy:
        """One as the management API shows it."""
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
        known = self if self.queues is not None else matched([self], [queue])[0]
        return queue in (known.queues or ())


#: A pattern that takes no time: literal characters, and ``.*`` at its end.
_PLAIN = re.compile(r"\^?(?:[\w<>/:%=-]|\\[.-]|\.(?![*+?{]))*(?:\.\*)?\$?")
#: Seconds that matching may take; patterns that may take longer, before all others are given up.
_MATCH_TIMEOUT, _MAX_SLOW = 2.0, 3
#: Reads patterns and names, writes the names that each pattern matches, a line each.
_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    try:
        found = [name for name in names if re.search(pattern, name)]
    except (re.error, OverflowError, RecursionError):
        found = names
    print(json.dumps(found), flush=True)
"""


def matched(policies: Iterable[Policy], queues: Sequence[str]) -> list[Policy]:
    """The policies, each with those of ``queues`` whose names its pattern matches.

    A pattern that Python cannot read (Erlang's dialect knows more) or that takes too long counts as
    matching all: rather too many than too few.
    """
    known, names = list(policies), list(queues)
    hard = list(dict.fromkeys(p.pattern for p in known if not _PLAIN.fullmatch(p.pattern)))
    found = dict(zip(hard, _match(hard, names), strict=True)) if hard else {}
    return [
        dataclasses.replace(
            policy,
            queues=frozenset(
                found[policy.pattern]
                if policy.pattern in found
                else (name for name in names if re.search(policy.pattern, name))
            ),
        )
        for policy in known
    ]


def _match(patterns: list[str], names: list[str]) -> list[list[str]]:
    """For each pattern the names that it matches; all names where that takes too long."""
    found: list[list[str]] = []
    slow = 0
    while len(found) < len(patterns) and slow < _MAX_SLOW:
        given = json.dumps([patterns[len(found) :], names]).encode()
        try:
            lines = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _MATCH],
                input=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_MATCH_TIMEOUT,
                check=False,
            ).stdout
        except subprocess.TimeoutExpired as late:
            lines = late.stdout or b""
        found += [
            json.loads(line) for line in lines.splitlines(keepends=True) if line[-1:] == b"\n"
        ]
        if len(found) < len(patterns):
            found.append(names)
            slow += 1
    return found + [names] * (len(patterns) - len(found))


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
