"""What a way of running a case has seen, and how that is compared with what the case expects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from airflow_broadway import Message

Case = dict[str, Any]


@dataclass
class Observed:
    """Everything that cases speak of.  ``None``: this way cannot tell, so it is not compared."""

    acks: list[dict[str, Any]] | None = field(default_factory=list)
    acks_total: dict[str, dict[str, list[Any]]] | None = None
    handle_message: list[Any] | None = field(default_factory=list)
    prepare_messages: list[Any] | None = field(default_factory=list)
    batches: list[dict[str, Any]] | None = field(default_factory=list)
    handle_failed: list[Any] | None = field(default_factory=list)
    handle_failed_status: list[Any] | None = field(default_factory=list)
    configured: list[Any] | None = field(default_factory=list)
    checkpoints: list[Any] | None = field(default_factory=list)
    telemetry: list[dict[str, Any]] | None = field(default_factory=list)
    sequence: list[Any] | None = field(default_factory=list)
    errors: list[str] | None = field(default_factory=list)
    ack_calls_that_raised: list[Any] | None = field(default_factory=list)

    def totals(self) -> dict[str, dict[str, list[Any]]]:
        """The acks summed per ref."""
        if self.acks_total is not None:
            return self.acks_total
        totals: dict[str, dict[str, list[Any]]] = {}
        for ack in self.acks or []:
            total = totals.setdefault(str(ack["ack_ref"]), {"successful": [], "failed": []})
            total["successful"] += ack["successful"]
            total["failed"] += ack["failed"]
        return totals


def freeze(value: Any) -> Any:
    """A JSON value as something hashable, for batch keys."""
    if isinstance(value, list):
        return tuple(map(freeze, value))
    if isinstance(value, dict):
        return tuple(sorted((key, freeze(each)) for key, each in value.items()))
    return value


def plain(value: Any) -> Any:
    """A value as JSON would show it."""
    return json.loads(json.dumps(value, default=str))


def status_of(message: Message) -> list[Any]:
    """A status as cases write it."""
    kind, reason, _ = message.status
    if kind == "ok":
        return ["ok"]
    return [kind, str(reason) if isinstance(reason, BaseException) else reason]


#: Broadway's own words, and ours for the same.
_WORDS = [
    (
        r"expected a Broadway\.Message from handle_message/3, got (.+)",
        r"expected a Message from handle_message, got: (.+)",
    ),
    (
        r"message was set to unknown batcher :(\w+)\. The known batchers are \[(.+)\]",
        r"message was set to unknown batcher '(\w+)'\. The known batchers are \[(.+)\]",
    ),
    (
        r"expected all messages to be returned from prepared_messages/2",
        r"expected all messages to be returned from prepare_messages: .+",
    ),
    (
        r"errors were found at the given arguments:\s+\* 1st argument: not a list\s*",
        r"prepare_messages must return a list of messages, got: .+",
    ),
    (
        r"handle_batch/4 must return a list of .+ structs, but one element was: (.+)",
        r"handle_batch must return a list of messages, but one element was: (.+)",
    ),
    (
        r"handle_batch/4 must return a list of .+ structs, got: (.+)",
        r"handle_batch must return a list of messages, got: (.+)",
    ),
    (r"function .+handle_batch/4 is undefined or private", r".+ defines no handle_batch"),
    (
        r"the configure/3 callback is not defined by acknowledger .+",
        r"cannot configure the acknowledgement of message .+ has no configure function",
    ),
]


def same_reason(expected: str, got: Any, given: str) -> bool:
    """Whether a reason is the one expected: the case's own words exactly, Broadway's in ours."""
    if expected == got or expected == json.dumps(got):
        return True
    for theirs, ours in _WORDS:
        match = re.fullmatch(theirs, expected)
        if match is not None:
            own = re.fullmatch(ours, str(got))
            return own is not None and _words(match) == _words(own)
    # Words of the case itself must come back as they are; of others only the kind counts.
    return json.dumps(expected)[1:-1] not in given


def _words(match: re.Match[str]) -> list[str]:
    return [re.sub(r"[:'\"]", "", group) for group in match.groups()]


def differences(case: Case, seen: Observed) -> list[str]:
    """What differs from the case's expectation or its accepted alternative; empty: nothing."""
    found = _differences(case, case["expect"], seen)
    alternative = case.get("accept", {}).get("alternative", {})
    if found and "acks" in alternative:
        expect = {**case["expect"], **alternative}
        for name in ("sequence", "errors", "never_acked", "acks_total", "why"):
            expect.pop(name, None)
        if not _differences(case, expect, seen):
            return []
        found.append("(nor is it the accepted alternative)")
    return found


def _differences(case: Case, expect: dict[str, Any], seen: Observed) -> list[str]:
    unordered = bool(case.get("unordered"))
    given = json.dumps(case["given"])
    same = _Comparer(unordered, given)
    found: list[str] = []

    def check(name: str, wanted: Any, got: Any, equal: Callable[[Any, Any], bool]) -> None:
        if got is not None and not equal(wanted, plain(got)):
            found.append(
                f"{name}{' (in any order)' if unordered else ''}:\n"
                f"  expected {json.dumps(wanted)}\n  got      {json.dumps(plain(got))}"
            )

    for name in (
        "handle_message",
        "prepare_messages",
        "handle_failed",
        "configured",
        "ack_calls_that_raised",
        "errors",
    ):
        if name in expect:
            check(name, expect[name], getattr(seen, name), same.lists)
    if "checkpoints" in expect:
        check("checkpoints", expect["checkpoints"], seen.checkpoints, lambda a, b: bool(a == b))
    if "acks" in expect:
        check("acks", expect["acks"], seen.acks, same.acks)
    if "acks_total" in expect:
        check("acks_total", expect["acks_total"], seen.totals(), same.totals)
    if "batches" in expect:
        check("batches", expect["batches"], seen.batches, same.subsets)
    if "handle_failed_status" in expect:
        check(
            "handle_failed_status",
            expect["handle_failed_status"],
            seen.handle_failed_status,
            same.status_lists,
        )
    if "telemetry" in expect:
        check("telemetry", expect["telemetry"], seen.telemetry, same.subsets)
    if "sequence" in expect and not unordered:
        check("sequence", expect["sequence"], seen.sequence, same.lists)
    if "never_acked" in expect:
        acked = [each for total in seen.totals().values() for one in total.values() for each in one]
        wrongly = [data for data in expect["never_acked"] if data in plain(acked)]
        if wrongly:
            found.append(f"never_acked: acknowledged all the same: {wrongly}")
    return found


class _Comparer:
    """Equality as the case means it: in order or not, reasons in either's words."""

    def __init__(self, unordered: bool, given: str) -> None:
        self._unordered = unordered
        self._given = given

    def lists(self, wanted: list[Any], got: list[Any]) -> bool:
        return self._pairs(wanted, got, lambda a, b: bool(a == b))

    def subsets(self, wanted: list[Any], got: list[Any]) -> bool:
        def holds(one: dict[str, Any], other: dict[str, Any]) -> bool:
            return all(name in other and other[name] == value for name, value in one.items())

        return self._pairs(wanted, got, holds)

    def acks(self, wanted: list[Any], got: list[Any]) -> bool:
        def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
            return all(
                one[name] == other[name] for name in ("ack_ref", "successful", "failed")
            ) and self.statuses(one.get("failed_status", []), other.get("failed_status"))

        return self._pairs(wanted, got, equal)

    def totals(self, wanted: dict[str, Any], got: dict[str, Any]) -> bool:
        def order(values: list[Any]) -> list[Any]:
            return sorted(values, key=json.dumps) if self._unordered else values

        return wanted.keys() == got.keys() and all(
            order(wanted[ref][kind]) == order(got[ref][kind])
            for ref in wanted
            for kind in ("successful", "failed")
        )

    def statuses(self, wanted: list[Any], got: list[Any] | None) -> bool:
        if not wanted or got is None:  # this way knows no statuses, or the case asks for none
            return True
        return len(wanted) == len(got) and all(
            one[0] == other[0]
            and (len(one) == 1 or same_reason(one[1], other[1], self._given))
            for one, other in zip(wanted, got, strict=True)
        )

    def status_lists(self, wanted: list[Any], got: list[Any]) -> bool:
        return self._pairs(wanted, got, self.statuses)

    def _pairs(
        self, wanted: list[Any], got: list[Any], equal: Callable[[Any, Any], bool]
    ) -> bool:
        if len(wanted) != len(got):
            return False
        if not self._unordered:
            return all(map(equal, wanted, got))
        left = list(got)
        for one in wanted:
            found = next((i for i, other in enumerate(left) if equal(one, other)), None)
            if found is None:
                return False
            del left[found]
        return True
