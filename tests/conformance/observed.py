"""The observations of a case's run, and their comparison with the expectation."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from airflow_broadway import Message

Case = dict[str, Any]

#: The value of a batch's key that a way cannot observe.
ANY = "*"


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collects what the package logs from a level on."""
    texts: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("airflow_broadway")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


@dataclass
class Observed:
    """The observations of a case.  ``None``: this way cannot observe it, so it is not compared."""

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
    #: (data, reason) of the messages that failed, where the broker keeps no more.
    reasons: list[tuple[Any, str]] | None = None
    #: Fields whose order this way does not keep; ``"batchers"``: that between batchers.
    unordered: frozenset[str] = frozenset()
    #: Events that this way does not emit.
    silent: frozenset[str] = frozenset()
    #: Whether what a timeout would have closed after the last message is closed by the end.
    flushes_last: bool = False

    def totals(self) -> dict[str, dict[str, list[Any]]] | None:
        """The acks summed per ref; ``None`` if this way cannot observe them."""
        if self.acks_total is not None or self.acks is None:
            return self.acks_total
        return totals_of(self.acks)


def totals_of(acks: list[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Acks summed per ref."""
    totals: dict[str, dict[str, list[Any]]] = {}
    for ack in acks:
        total = totals.setdefault(str(ack["ack_ref"]), {"successful": [], "failed": []})
        total["successful"] += ack["successful"]
        total["failed"] += ack["failed"]
    return totals


def freeze(value: Any) -> Any:
    """A JSON value as something hashable, for batch keys."""
    if isinstance(value, list):
        return tuple(map(freeze, value))
    if isinstance(value, dict):
        return tuple(sorted((key, freeze(element)) for key, element in value.items()))
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
    # A DataFrame's handle_batch returns no messages; these are its wrong returns.
    (
        r"handle_batch/4 must return a list of .+ structs, but one element was: (.+)",
        r"handle_batch returned list \[(?:.+, )?(.+?)\]; on Spark it returns .+",
    ),
    (
        r"handle_batch/4 must return a list of .+ structs, got: (.+)",
        r"handle_batch returned \w+ (.+); on Spark it returns .+",
    ),
    (r"function .+handle_batch/4 is undefined or private", r".+ defines no handle_batch"),
    (
        r"the configure/3 callback is not defined by acknowledger .+",
        r"cannot configure the acknowledgement of message .+ has no configure function",
    ),
]


def same_reason(expected: str, got: Any) -> bool:
    """Whether a reason is the one expected: the case's own words exactly, Broadway's in ours."""
    if expected == got or expected == json.dumps(got):
        return True
    for theirs, ours in _WORDS:
        match = re.fullmatch(theirs, expected)
        own = re.fullmatch(ours, str(got), re.DOTALL)
        if match is not None and own is not None and _words(match) == _words(own):
            return True
    return False


def _words(match: re.Match[str]) -> list[str]:
    return [re.sub(r"[:'\"]", "", group) for group in match.groups()]


def differences(case: Case, seen: Observed) -> list[str]:
    """Returns the differences from the case's expectation or its accepted alternative."""
    differences_ = _differences(case, case["expect"], seen)
    alternative = alternative_of(case)
    if differences_ and alternative is not None:
        if not _differences(case, alternative, seen):
            return []
        differences_.append("(nor is it the accepted alternative)")
    return differences_


def alternative_of(case: Case) -> dict[str, Any] | None:
    """Returns a case's accepted alternative, or ``None``."""
    alternative = case.get("accept", {}).get("alternative", {})
    if "acks" not in alternative:
        return None
    expect = {**case["expect"], "acks_total": totals_of(alternative["acks"]), **alternative}
    left_out = ("sequence", "errors", "never_acked", "why")
    return {name: value for name, value in expect.items() if name not in left_out}


def _differences(case: Case, expect: dict[str, Any], seen: Observed) -> list[str]:
    differences: list[str] = []

    def unordered(name: str) -> bool:
        return bool(case.get("unordered")) or name in seen.unordered

    def check(name: str, wanted: Any, got: Any, equal: str) -> None:
        if got is None:
            return
        got = plain(got)
        if not getattr(_Comparer(unordered(name)), equal)(wanted, got):
            differences.append(
                f"{name}{' (in any order)' if unordered(name) else ''}:\n"
                f"  expected {json.dumps(wanted)}\n  got      {json.dumps(got)}"
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
            check(name, expect[name], getattr(seen, name), "lists")
    if "checkpoints" in expect:
        check("checkpoints", expect["checkpoints"], seen.checkpoints, "exactly")
    if "acks" in expect:
        check("acks", expect["acks"], seen.acks, "acks")
        if seen.reasons is not None:
            check("reasons", _failed_statuses(expect["acks"]), seen.reasons, "reasons")
    if "acks_total" in expect:
        check("acks_total", expect["acks_total"], seen.totals(), "totals")
    if "handle_message_columns" in expect and seen.handle_message is not None:
        # One processor's messages are in order, independently of the others.
        wanted, got = expect["handle_message"], seen.handle_message
        check("handle_message of each processor", _lanes(wanted), _lanes(got), "exactly")
    if "batches" in expect and seen.batches is not None:
        wanted, got = expect["batches"], seen.batches
        # Batches of one partition, or else of one key, are in order.
        check("batches of each lane", _lanes(wanted), _lanes(got), "exactly")
        if "batchers" in seen.unordered:
            wanted, got = _by_batcher(wanted), _by_batcher(got)
        check("batches", wanted, got, "flushed" if seen.flushes_last else "subsets")
    if "handle_failed_status" in expect:
        check(
            "handle_failed_status",
            expect["handle_failed_status"],
            seen.handle_failed_status,
            "status_lists",
        )
    if "telemetry" in expect:
        events = [event for event in expect["telemetry"] if event["event"] not in seen.silent]
        check("telemetry", events, seen.telemetry, "subsets")
    if "sequence" in expect and not case.get("unordered"):
        check("sequence", expect["sequence"], seen.sequence, "lists")
    totals = seen.totals()
    if "never_acked" in expect and totals is not None:
        acked = [item for total in totals.values() for one in total.values() for item in one]
        wrongly = [data for data in expect["never_acked"] if data in plain(acked)]
        if wrongly:
            differences.append(f"never_acked: acknowledged all the same: {wrongly}")
    return differences


def _same_status(wanted: list[Any], got: list[Any]) -> bool:
    """Whether a status is the one expected; one without a reason has none."""
    kind, reason = [*got, None][:2]
    if len(wanted) != 2:
        return wanted == [kind] and reason is None
    return bool(wanted[0] == kind and same_reason(wanted[1], reason))


def _failed_statuses(acks: list[dict[str, Any]]) -> list[list[Any]]:
    """(data, status) of each failed message; of one without a status nothing is expected."""
    return [
        [data, status]
        for ack in acks
        for data, status in zip(
            ack["failed"], ack.get("failed_status", [None] * len(ack["failed"])), strict=True
        )
    ]


def _lanes(rows: list[Any]) -> dict[str, list[Any]]:
    """Data of (data, processor) rows, or of batches, by what keeps its order."""
    lanes: dict[str, list[Any]] = {}
    for row in rows:
        if isinstance(row, dict):
            order = "batch_key" if row["partition"] is None else "partition"
            lane, data = [row["batcher"], order, row[order]], row["data"]
        else:
            data, lane = row[:1], row[1:]
        lanes.setdefault(json.dumps(plain(lane)), []).append(data)
    return lanes


def _by_batcher(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(batches, key=lambda batch: str(batch["batcher"]))


class _Comparer:
    """Equality as the case means it: in order or not, reasons in either's words."""

    def __init__(self, unordered: bool) -> None:
        self._unordered = unordered

    def exactly(self, wanted: Any, got: Any) -> bool:
        return bool(wanted == got)

    def lists(self, wanted: list[Any], got: list[Any]) -> bool:
        return self._pairs(wanted, got, self.exactly)

    def subsets(self, wanted: list[Any], got: list[Any]) -> bool:
        def holds(one: dict[str, Any], other: dict[str, Any]) -> bool:
            return all(name in other and other[name] in (value, ANY) for name, value in one.items())

        return self._pairs(wanted, got, holds)

    def flushed(self, wanted: list[Any], got: list[Any]) -> bool:
        """As :meth:`subsets`, but for batches that the end closed in place of a timeout."""

        def holds(one: dict[str, Any], other: dict[str, Any]) -> bool:
            triggers = one.get("trigger"), other["trigger"]
            one = {**one, "trigger": "flush"} if triggers == ("timeout", "flush") else one
            return self.subsets([one], [other])

        return self._pairs(wanted, got, holds)

    def acks(self, wanted: list[Any], got: list[Any]) -> bool:
        def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
            return all(
                one[name] == other[name] for name in ("ack_ref", "successful", "failed")
            ) and (  # an alternative names none
                "failed_status" not in one
                or self.statuses(one["failed_status"], other.get("failed_status"))
            )

        return self._pairs(wanted, got, equal)

    def totals(self, wanted: dict[str, Any], got: dict[str, Any]) -> bool:
        def order(values: list[Any]) -> list[Any]:
            return sorted(values, key=json.dumps) if self._unordered else values

        return wanted.keys() == got.keys() and all(
            order(wanted[ref][kind]) == order(got[ref][kind])
            for ref in wanted
            for kind in ("successful", "failed")
        )

    def reasons(self, wanted: list[Any], got: list[Any]) -> bool:
        """Whether each message that failed did so for a reason that is expected of it."""

        def equal(one: list[Any], other: list[Any]) -> bool:
            (data, status), (failed, reason) = one, other
            if data != failed or status is None:
                return bool(data == failed)
            if len(status) == 1:  # a failure that bears no reason
                return bool(reason == "")
            # An exception's text begins with its type.
            words = [reason, reason.partition(": ")[2]] if status[0] == "error" else [reason]
            if status[0] == "exit":  # with its kind, which distinguishes it from a user's text
                words = [reason.partition("SystemExit: ")[2]]
            return any(same_reason(str(status[1]), word) for word in words)

        left = list(wanted)
        for one in got:
            index = next((i for i, element in enumerate(left) if equal(element, one)), None)
            if index is None:
                return False
            del left[index]
        return True

    def statuses(self, wanted: list[Any], got: list[Any] | None) -> bool:
        if got is None:  # this way knows no statuses
            return True
        return len(wanted) == len(got) and all(map(_same_status, wanted, got))

    def status_lists(self, wanted: list[Any], got: list[Any]) -> bool:
        return self._pairs(wanted, got, self.statuses)

    def _pairs(self, wanted: list[Any], got: list[Any], equal: Callable[[Any, Any], bool]) -> bool:
        if len(wanted) != len(got):
            return False
        if not self._unordered:
            return all(map(equal, wanted, got))
        # Those that are the same to the letter first: others may be taken for more than one.
        left, others = list(got), []
        for one in wanted:
            if one in left:
                left.remove(one)
            else:
                others.append(one)
        for one in others:
            index = next((i for i, other in enumerate(left) if equal(one, other)), None)
            if index is None:
                return False
            del left[index]
        return True
