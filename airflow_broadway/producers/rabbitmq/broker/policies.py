"""Policies, and what applies to a queue with them: https://www.rabbitmq.com/docs/parameters.

Among the users' policies whose pattern matches the queue, the one with the highest priority
applies, alone; so among the operators'.  Where a policy and an argument of the queue set the same
limit, the lower one applies; in all else, the argument.

The management API computes the same for queues that exist, as ``effective_policy_definition``, but
shows it with its statistics: a policy that was set just now is missing there for up to 10 seconds.

A pattern can be written so that matching it takes for ever.  So all but the plainest patterns are
matched in a process of its own, which is ended when it takes too long.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

#: The limits, of which the lower one counts: milliseconds, returns, messages, bytes.
LIMITS = ("expires", "message-ttl", "delivery-limit", "max-length", "max-length-bytes")
#: The types of queues that a policy may be for, beside all.
_TYPES = {"classic_queues": "classic", "quorum_queues": "quorum", "streams": "stream"}


class Setting(NamedTuple):
    """A setting that counts for a queue.

    :param by: What sets it, for people.
    """

    value: Any
    by: str


class Policies:
    """The policies of a virtual host, as they apply to some queues.

    A pattern that Python cannot read (Erlang's dialect knows more) or that takes too long counts as
    matching all: rather too many than too few.

    :param policies: What they are called, for people → those, as the management API shows them.
    :param queues: The names of the queues.
    """

    def __init__(
        self, policies: Mapping[str, Iterable[Mapping[str, Any]]], queues: Sequence[str]
    ) -> None:
        # The highest priority first.
        self._policies = {
            kind: sorted(shown, key=lambda policy: -policy["priority"])
            for kind, shown in policies.items()
        }
        patterns = [policy["pattern"] for shown in self._policies.values() for policy in shown]
        self._matching = _matching(patterns, queues)

    def effective(self, queue: str, kind: str, arguments: Mapping[str, Any]) -> dict[str, Setting]:
        """Returns what counts for a queue: name without ``x-`` → value and what sets it.

        :param kind: ``classic``, ``quorum`` or ``stream``.
        :param arguments: With which the queue is declared.
        """
        settings = {
            name.removeprefix("x-"): Setting(value, "its declaration")
            for name, value in arguments.items()
        }
        for policy_kind, policies in self._policies.items():
            fitting = [policy for policy in policies if self._applies(policy, queue, kind)]
            for policy in fitting[:1]:
                for name, value in policy["definition"].items():
                    before = settings.get(name)
                    if before is None or (name in LIMITS and _is_less(value, before.value)):
                        settings[name] = Setting(value, f"the {policy_kind} {policy['name']!r}")
        return settings

    def _applies(self, policy: Mapping[str, Any], queue: str, kind: str) -> bool:
        apply_to = policy["apply-to"]
        if apply_to not in ("all", "queues") and _TYPES.get(apply_to) != kind:
            return False
        return queue in self._matching[policy["pattern"]]


def _is_less(value: Any, other: Any) -> bool:
    numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
    return bool(numbers and value < other)


# -- patterns --------------------------------------------------------------------------------------

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
        matching = [name for name in names if re.search(pattern, name)]
    except (re.error, OverflowError, RecursionError):
        matching = names
    print(json.dumps(matching), flush=True)
"""


def _matching(patterns: Iterable[str], names: Sequence[str]) -> dict[str, Collection[str]]:
    """Returns the names that each pattern matches; all names where that takes too long."""
    matching: dict[str, Collection[str]] = {}
    hard = []
    for pattern in dict.fromkeys(patterns):
        if _PLAIN.fullmatch(pattern):
            matching[pattern] = [name for name in names if re.search(pattern, name)]
        else:
            hard.append(pattern)
    slow = 0
    while hard and slow < _MAX_SLOW:
        answers = _match_apart(hard, names)
        matching.update(zip(hard, answers, strict=False))
        hard = hard[len(answers) :]
        if hard:
            matching[hard.pop(0)] = names
            slow += 1
    return {**matching, **dict.fromkeys(hard, names)}


def _match_apart(patterns: list[str], names: Sequence[str]) -> list[list[str]]:
    """Returns the names that the first patterns match: of all that were matched in time."""
    try:
        lines = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([patterns, list(names)]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MATCH_TIMEOUT,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as late:
        lines = late.stdout or b""
    return [json.loads(line) for line in lines.splitlines(keepends=True) if line[-1:] == b"\n"]
