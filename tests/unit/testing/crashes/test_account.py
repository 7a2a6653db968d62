"""Every message and every row is accounted for, independently of the package's reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, Message, RetryPolicy
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.testing.crashes.account import (
    ACKED,
    DEAD,
    DROPPED,
    Account,
    Violation,
    check_messages,
)
from airflow_broadway.testing.crashes.sink import ForkError
from airflow_broadway.testing.crashes.subject import DeadLetter, Subject


class Sink(Broadway):
    producer = SqliteProducer(queue="q", path="/given")
    batchers = {"default": Batcher(engine="python")}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return messages


class Dropping(Sink):
    producer = SqliteProducer(queue="q", path="/given", on_failure="ack")


class WithoutLetters(Sink):
    producer = SqliteProducer(queue="q", path="/given", retry=RetryPolicy(dead_letter=False))


class StubSubject(Subject):
    """A subject whose broker and sink state a test sets."""

    def __init__(self, folder: Path, pipeline: type[Broadway] = Sink) -> None:
        super().__init__(pipeline, folder)
        self.dead: list[DeadLetter] = []
        self.sink_rows: list[str] | None = None
        self.fails = False

    def overrides(self) -> Mapping[str, Any]:
        return {}

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        return []

    def waiting(self) -> int:
        return 0

    def letters(self) -> list[DeadLetter]:
        return self.dead

    def rows(self, ids: Sequence[str]) -> Counter[str] | None:
        if self.fails:
            raise ForkError("torn")
        return None if self.sink_rows is None else Counter(self.sink_rows)

    def record_call(
        self,
        *keys: str,
        batch_id: str = "b",
        redelivered: bool = False,
        returned: bool = True,
        succeeded: Sequence[str] | None = None,
    ) -> None:
        """Records a call of ``handle_batch``."""
        subject = {
            "execution": "one/batch.default/1",
            "stage": "handle_batch",
            "batch_id": batch_id,
            "messages": [(key, 1, redelivered) for key in keys],
        }
        with self.calls_file.open("a") as file:
            file.write(json.dumps({**subject, "succeeded": None}) + "\n")
            if returned:
                fine = list(keys if succeeded is None else succeeded)
                file.write(json.dumps({**subject, "succeeded": fine}) + "\n")


@pytest.fixture
def subject(tmp_path: Path) -> StubSubject:
    return StubSubject(tmp_path)


def violations(account: Account) -> list[Violation]:
    return [kind for kind in Violation if kind in account.violations]


def test_a_message_without_an_outcome_is_lost(subject: StubSubject) -> None:
    subject.record_call("a", "b", succeeded=["a"])
    subject.dead = [DeadLetter("b", False, "no good")]
    assert check_messages(subject, ["a", "b"]).passed

    account = check_messages(subject, ["a", "b", "c"])
    assert account.outcomes == {0: ACKED, 1: DEAD, 2: ""}
    assert account.lines == ["lost: c"]
    assert account.reasons == ["no good"]


def test_a_call_that_did_not_return_handled_nothing(subject: StubSubject) -> None:
    subject.record_call("a", returned=False)
    assert violations(check_messages(subject, ["a"])) == [Violation.LOST]


def test_an_outcome_that_differs_from_the_baseline_is_a_mistake(subject: StubSubject) -> None:
    subject.record_call("a")
    assert check_messages(subject, ["a"], Account({0: DEAD})).lines == [
        "mistake: a is acked, and should be dead"
    ]


def test_a_fault_in_a_callback_may_use_up_the_last_attempt(subject: StubSubject) -> None:
    subject.record_call("a", "b", succeeded=["a"])
    subject.dead = [DeadLetter("b", False)]
    subject.sink_rows = ["a"]
    expected = Account({0: ACKED, 1: ACKED}, rows=Counter(["a", "b"]))

    injected = ["one/batch.default/1"]
    assert check_messages(subject, ["a", "b"], expected, injected).passed
    assert violations(check_messages(subject, ["a", "b"], expected, ["one/process/1"])) == [
        Violation.MISSING,
        Violation.OTHER,
    ]
    subject.sink_rows = ["a", "a"]
    assert violations(check_messages(subject, ["a", "b"], expected, injected)) == [
        Violation.REPEATED
    ]


@pytest.mark.parametrize("pipeline", [Dropping, WithoutLetters])
def test_only_failed_messages_may_be_dropped(tmp_path: Path, pipeline: type[Broadway]) -> None:
    subject = StubSubject(tmp_path, pipeline)
    subject.record_call("a", succeeded=[])

    assert check_messages(subject, ["a"]).outcomes == {0: DROPPED}
    assert check_messages(subject, ["a"], Account({0: DROPPED})).passed
    assert violations(check_messages(subject, ["a"], Account({0: ACKED}))) == [Violation.LOST]


def test_a_redelivery_must_be_marked(subject: StubSubject) -> None:
    subject.record_call("a", batch_id="b1")
    subject.record_call("a", batch_id="b2", redelivered=True)
    assert check_messages(subject, ["a"]).passed

    subject.record_call("a", batch_id="b3")
    assert violations(check_messages(subject, ["a"])) == [Violation.UNMARKED]


def test_a_repeated_batch_has_the_same_messages(subject: StubSubject) -> None:
    subject.record_call("a", "b")
    subject.record_call("a", "b")
    assert check_messages(subject, ["a", "b"]).passed

    subject.record_call("a")
    lines = check_messages(subject, ["a", "b"]).lines
    assert lines
    assert all(line.endswith("with other messages") for line in lines)


def test_leftover_files_are_reported(subject: StubSubject) -> None:
    for name in ("Sink/crashes/one/lease.json", "Sink/crashes/last/lease.json"):
        path = subject.work / "staging" / name
        path.parent.mkdir(parents=True)
        path.touch()
    assert check_messages(subject, []).lines == ["left over: Sink/crashes/one/lease.json"]


def test_rows_are_compared_with_the_baseline(subject: StubSubject) -> None:
    subject.sink_rows = ["1", "1", "3"]

    account = check_messages(subject, [], Account(rows=Counter(["1", "2"])))

    assert account.lines == [
        "missing in the sink: 2 is there nowhere, and should be once",
        "repeated in the sink: 1 is there twice, and should be once",
        "repeated in the sink: 3 is there once, and should be nowhere",
    ]
    assert check_messages(subject, [], Account(rows=Counter(["1", "1", "3"]))).passed


def test_an_unreadable_sink_is_a_mistake(subject: StubSubject) -> None:
    subject.fails = True
    assert check_messages(subject, []).lines == ["mistake: the sink cannot be read: torn"]
