"""The observations of a case's run, and their comparison with the expected ones."""

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

#: The value of a batch key that a runner cannot observe.
ANY = "*"


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collects the package's log messages from a level on."""
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
    """The observations of a case; ``None`` is not compared: the runner cannot observe it."""

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
    #: (data, reason) of failed messages, if the broker keeps no more.
    reasons: list[tuple[Any, str]] | None = None
    #: Fields that the runner does not order; ``"batchers"``: batches of different batchers.
    unordered: frozenset[str] = frozenset()
    #: Events that the runner does not emit.
    silent: frozenset[str] = frozenset()
    #: Whether the end of input closes batches that a timeout would have closed.
    flushes_last: bool = False

    def totals(self) -> dict[str, dict[str, list[Any]]] | None:
        """The acks by ref; ``None`` if the runner cannot observe them."""
        if self.acks_total is not None or self.acks is None:
            return self.acks_total
        return totals_of(self.acks)


def totals_of(acks: list[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Merges acks by ref."""
    totals: dict[str, dict[str, list[Any]]] = {}
    for ack in acks:
        total = totals.setdefault(str(ack["ack_ref"]), {"successful": [], "failed": []})
        total["successful"] += ack["successful"]
        total["failed"] += ack["failed"]
    return totals


def freeze(value: Any) -> Any:
    """Converts a JSON value to a hashable one, for batch keys."""
    if isinstance(value, list):
        return tuple(map(freeze, value))
    if isinstance(value, dict):
        return tuple(sorted((key, freeze(element)) for key, element in value.items()))
    return value


def plain(value: Any) -> Any:
    """Converts a value to JSON values."""
    return json.loads(json.dumps(value, default=str))


def status_of(message: Message) -> list[Any]:
    """Returns a message's status in the cases' format."""
    kind, reason, _ = message.status
    if kind == "ok":
        return ["ok"]
    return [kind, str(reason) if isinstance(reason, BaseException) else reason]


#: Patterns of Broadway's error texts and of the package's equivalent texts.
_EQUIVALENT_TEXTS = [
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
    # Errors of handle_batch with a DataFrame, which returns no messages.
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


def same_reason(expected: str, actual: Any) -> bool:
    """Returns whether a reason equals the expected one, or is the equivalent of Broadway's text."""
    if expected == actual or expected == json.dumps(actual):
        return True
    for broadway_text, own_text in _EQUIVALENT_TEXTS:
        match = re.fullmatch(broadway_text, expected)
        own = re.fullmatch(own_text, str(actual), re.DOTALL)
        if match is not None and own is not None and _captured_words(match) == _captured_words(own):
            return True
    return False


def _captured_words(match: re.Match[str]) -> list[str]:
    return [re.sub(r"[:'\"]", "", group) for group in match.groups()]


def differences(case: Case, observed: Observed) -> list[str]:
    """Returns the differences from the case's expectation or its accepted alternative."""
    differences_ = _differences(case, case["expect"], observed)
    alternative = alternative_of(case)
    if differences_ and alternative is not None:
        if not _differences(case, alternative, observed):
            return []
        differences_.append("(the accepted alternative differs as well)")
    return differences_


def alternative_of(case: Case) -> dict[str, Any] | None:
    """Returns a case's accepted alternative, or ``None``."""
    alternative = case.get("accept", {}).get("alternative", {})
    if "acks" not in alternative:
        return None
    expect = {**case["expect"], "acks_total": totals_of(alternative["acks"]), **alternative}
    skipped = ("sequence", "errors", "never_acked", "why")
    return {name: value for name, value in expect.items() if name not in skipped}


def _differences(case: Case, expect: dict[str, Any], observed: Observed) -> list[str]:
    differences: list[str] = []

    def unordered(name: str) -> bool:
        return bool(case.get("unordered")) or name in observed.unordered

    def check(name: str, expected: Any, actual: Any, equal: str) -> None:
        if actual is None:
            return
        actual = plain(actual)
        if not getattr(_Comparer(unordered(name)), equal)(expected, actual):
            differences.append(
                f"{name}{' (in any order)' if unordered(name) else ''}:\n"
                f"  expected {json.dumps(expected)}\n  got      {json.dumps(actual)}"
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
            check(name, expect[name], getattr(observed, name), "lists")
    if "checkpoints" in expect:
        check("checkpoints", expect["checkpoints"], observed.checkpoints, "exactly")
    if "acks" in expect:
        check("acks", expect["acks"], observed.acks, "acks")
        if observed.reasons is not None:
            check("reasons", _failed_statuses(expect["acks"]), observed.reasons, "reasons")
    if "acks_total" in expect:
        check("acks_total", expect["acks_total"], observed.totals(), "totals")
    if "handle_message_columns" in expect and observed.handle_message is not None:
        # The messages of one processor are ordered.
        expected, actual = expect["handle_message"], observed.handle_message
        check("handle_message of each processor", _lanes(expected), _lanes(actual), "exactly")
    if "batches" in expect and observed.batches is not None:
        expected, actual = expect["batches"], observed.batches
        # The batches of one partition, or of one key, are ordered.
        check("batches of each lane", _lanes(expected), _lanes(actual), "exactly")
        if "batchers" in observed.unordered:
            expected, actual = _by_batcher(expected), _by_batcher(actual)
        check("batches", expected, actual, "flushed" if observed.flushes_last else "subsets")
    if "handle_failed_status" in expect:
        check(
            "handle_failed_status",
            expect["handle_failed_status"],
            observed.handle_failed_status,
            "status_lists",
        )
    if "telemetry" in expect:
        events = [event for event in expect["telemetry"] if event["event"] not in observed.silent]
        check("telemetry", events, observed.telemetry, "subsets")
    if "sequence" in expect and not case.get("unordered"):
        check("sequence", expect["sequence"], observed.sequence, "lists")
    totals = observed.totals()
    if "never_acked" in expect and totals is not None:
        acked = [item for total in totals.values() for one in total.values() for item in one]
        wrongly = [data for data in expect["never_acked"] if data in plain(acked)]
        if wrongly:
            differences.append(f"never_acked: acknowledged nevertheless: {wrongly}")
    return differences


def _take(elements: list[Any], matches: Callable[[Any], bool]) -> bool:
    """Removes the first element that matches; returns whether there is one."""
    index = next((i for i, element in enumerate(elements) if matches(element)), None)
    if index is not None:
        del elements[index]
    return index is not None


def _same_status(expected: list[Any], actual: list[Any]) -> bool:
    """Returns whether a status equals the expected one."""
    kind, reason = [*actual, None][:2]
    if len(expected) != 2:
        return expected == [kind] and reason is None
    return bool(expected[0] == kind and same_reason(expected[1], reason))


def _failed_statuses(acks: list[dict[str, Any]]) -> list[list[Any]]:
    """Returns (data, status) of each failed message with an expected status."""
    return [
        [data, status]
        for ack in acks
        for data, status in zip(
            ack["failed"], ack.get("failed_status", [None] * len(ack["failed"])), strict=True
        )
    ]


def _lanes(rows: list[Any]) -> dict[str, list[Any]]:
    """Groups the data of (data, processor) rows, or batches, by their ordered lane."""
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
    """Compares expected and actual values, ordered or not, with equivalent error texts."""

    def __init__(self, unordered: bool) -> None:
        self._unordered = unordered

    def exactly(self, expected: Any, actual: Any) -> bool:
        return bool(expected == actual)

    def lists(self, expected: list[Any], actual: list[Any]) -> bool:
        return self._pairs(expected, actual, self.exactly)

    def subsets(self, expected: list[Any], actual: list[Any]) -> bool:
        def holds(one: dict[str, Any], other: dict[str, Any]) -> bool:
            return all(name in other and other[name] in (value, ANY) for name, value in one.items())

        return self._pairs(expected, actual, holds)

    def flushed(self, expected: list[Any], actual: list[Any]) -> bool:
        """Compares like :meth:`subsets`; the end of input may close a batch before its timeout."""

        def holds(one: dict[str, Any], other: dict[str, Any]) -> bool:
            triggers = one.get("trigger"), other["trigger"]
            one = {**one, "trigger": "flush"} if triggers == ("timeout", "flush") else one
            return self.subsets([one], [other])

        return self._pairs(expected, actual, holds)

    def acks(self, expected: list[Any], actual: list[Any]) -> bool:
        def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
            return all(
                one[name] == other[name] for name in ("ack_ref", "successful", "failed")
            ) and (  # an alternative may have no statuses
                "failed_status" not in one
                or self.statuses(one["failed_status"], other.get("failed_status"))
            )

        return self._pairs(expected, actual, equal)

    def totals(self, expected: dict[str, Any], actual: dict[str, Any]) -> bool:
        def order(values: list[Any]) -> list[Any]:
            return sorted(values, key=json.dumps) if self._unordered else values

        return expected.keys() == actual.keys() and all(
            order(expected[ref][kind]) == order(actual[ref][kind])
            for ref in expected
            for kind in ("successful", "failed")
        )

    def reasons(self, expected: list[Any], actual: list[Any]) -> bool:
        """Returns whether every failed message has one of its expected reasons."""

        def equal(one: list[Any], other: list[Any]) -> bool:
            (data, status), (failed, reason) = one, other
            if data != failed or status is None:
                return bool(data == failed)
            if len(status) == 1:  # a failure without a reason
                return bool(reason == "")
            # An exception's text begins with its type.
            words = [reason, reason.partition(": ")[2]] if status[0] == "error" else [reason]
            if status[0] == "exit":  # the kind distinguishes it from a user's text
                words = [reason.partition("SystemExit: ")[2]]
            return any(same_reason(str(status[1]), word) for word in words)

        remaining = list(expected)
        return all(_take(remaining, lambda other: equal(other, one)) for one in actual)  # noqa: B023

    def statuses(self, expected: list[Any], actual: list[Any] | None) -> bool:
        if actual is None:  # the runner does not observe statuses
            return True
        return len(expected) == len(actual) and all(map(_same_status, expected, actual))

    def status_lists(self, expected: list[Any], actual: list[Any]) -> bool:
        return self._pairs(expected, actual, self.statuses)

    def _pairs(
        self, expected: list[Any], actual: list[Any], equal: Callable[[Any, Any], bool]
    ) -> bool:
        if len(expected) != len(actual):
            return False
        if not self._unordered:
            return all(map(equal, expected, actual))
        # Exact matches first, because other elements may match more than one.
        remaining, others = list(actual), []
        for one in expected:
            if one in remaining:
                remaining.remove(one)
            else:
                others.append(one)
        return all(_take(remaining, lambda other: equal(one, other)) for one in others)  # noqa: B023
