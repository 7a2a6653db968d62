"""The account of messages and rows, independent of the package."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Batcher, Broadway, RetryPolicy
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.testing.crashes.account import (
    ACKED,
    DEAD,
    DROPPED,
    Account,
    Violation,
    account,
)
from airflow_broadway.testing.crashes.sink import SinkError
from tests.unit.passing import Passing


class Sink(Passing):
    producer = SqliteProducer(queue="q", path="/given")
    batchers = {"default": Batcher(engine="python")}


class Dropping(Sink):
    producer = SqliteProducer(queue="q", path="/given", on_failure="ack")


class WithoutLetters(Sink):
    producer = SqliteProducer(queue="q", path="/given", retry=RetryPolicy(dead_letter=False))


class Scripted(Subject):
    """A subject whose results a test sets."""

    kind = "scripted"

    def __init__(self, folder: Path, pipeline: type[Broadway] = Sink) -> None:
        super().__init__(pipeline, folder)
        self.dead: list[Letter] = []
        self.sink_rows: list[str] | None = None
        self.fails = False

    def overrides(self) -> Mapping[str, Any]:
        return {}

    def send(self, bodies: Sequence[bytes]) -> list[str]:
        return []

    def waiting(self) -> int:
        return 0

    def letters(self) -> list[Letter]:
        return self.dead

    def rows(self, ids: Sequence[str]) -> Counter[str] | None:
        if self.fails:
            raise SinkError("torn")
        return None if self.sink_rows is None else Counter(self.sink_rows)

    def called(
        self,
        *keys: str,
        batch_id: str = "b",
        again: bool = False,
        ended: bool = True,
        succeeded: Sequence[str] | None = None,
    ) -> None:
        """A batch was handled."""
        messages = [(key, 1, again) for key in keys]
        place = {"execution": "one/batch.default/1", "stage": "handle_batch"}
        call = {**place, "batch_id": batch_id, "messages": messages}
        with self.calls_file.open("a") as file:
            file.write(json.dumps({**call, "succeeded": None}) + "\n")
            if ended:
                fine = list(keys if succeeded is None else succeeded)
                file.write(json.dumps({**call, "succeeded": fine}) + "\n")


@pytest.fixture
def subject(tmp_path):
    return Scripted(tmp_path)


def wrong(result: Account) -> list[Violation]:
    return list(result.wrong)


def test_unsettled_message_is_lost(subject):
    subject.called("a", "b", succeeded=["a"])
    subject.dead = [Letter("b", False, "no good")]
    assert account(subject, ["a", "b"], None).good

    accounts = account(subject, ["a", "b", "c"], None)
    assert accounts.fates == {0: ACKED, 1: DEAD, 2: ""}
    assert accounts.lines == ["lost: c"]
    assert accounts.reasons == ["no good"]


def test_interrupted_call_handles_no_message(subject):
    subject.called("a", ended=False)
    assert wrong(account(subject, ["a"], None)) == [Violation.LOST]


def test_changed_outcome_is_a_mistake(subject):
    subject.called("a")
    assert account(subject, ["a"], {0: DEAD}).lines == ["mistake: a is acked, and should be dead"]


def test_failed_callback_may_use_the_last_attempt(subject):
    subject.called("a", "b", succeeded=["a"])
    subject.dead = [Letter("b", False)]
    subject.sink_rows = ["a"]
    fates, rows = {0: ACKED, 1: ACKED}, Counter(["a", "b"])

    struck = ["one/batch.default/1"]
    assert account(subject, ["a", "b"], fates, rows, struck).good
    mistakes = wrong(account(subject, ["a", "b"], fates, rows, ["one/process/1"]))
    assert mistakes == [Violation.MISSING, Violation.OTHER]
    subject.sink_rows = ["a", "a"]
    assert wrong(account(subject, ["a", "b"], fates, rows, struck)) == [Violation.REPEATED]


@pytest.mark.parametrize("pipeline", [Dropping, WithoutLetters])
def test_only_a_message_that_should_fail_may_be_dropped(tmp_path, pipeline):
    subject = Scripted(tmp_path, pipeline)
    subject.called("a", succeeded=[])

    assert account(subject, ["a"], None).fates == {0: DROPPED}
    assert account(subject, ["a"], {0: DROPPED}).good
    assert wrong(account(subject, ["a"], {0: ACKED})) == [Violation.LOST]


def test_repetition_must_be_marked(subject):
    subject.called("a", batch_id="b1")
    subject.called("a", batch_id="b2", again=True)
    assert account(subject, ["a"], None).good

    subject.called("a", batch_id="b3")
    assert wrong(account(subject, ["a"], None)) == [Violation.UNMARKED]


def test_repeated_batch_has_the_same_messages(subject):
    subject.called("a", "b")
    subject.called("a", "b")
    assert account(subject, ["a", "b"], None).good

    subject.called("a")
    lines = account(subject, ["a", "b"], None).lines
    assert {line.rpartition(" with ")[2] for line in lines} == {"other messages"}


def test_leftover_files_are_named(subject):
    for name in ("one", "last"):
        path = subject.work / "staging/Sink/crashes" / name / "lease.json"
        path.parent.mkdir(parents=True)
        path.touch()
    assert account(subject, [], None).lines == ["left over: Sink/crashes/one/lease.json"]


def test_rows_are_compared_with_an_undisturbed_run(subject):
    subject.sink_rows = ["1", "1", "3"]

    accounts = account(subject, [], None, Counter(["1", "2"]))

    assert accounts.lines == [
        "missing in the sink: 2 is there nowhere, and should be once",
        "repeated in the sink: 1 is there twice, and should be once",
        "repeated in the sink: 3 is there once, and should be nowhere",
    ]
    assert account(subject, [], None, Counter(["1", "1", "3"])).good


def test_unreadable_sink_is_a_mistake_of_its_case(subject):
    subject.fails = True
    assert account(subject, [], None).lines == ["mistake: the sink cannot be read: torn"]
