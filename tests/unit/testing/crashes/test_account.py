"""Every message and every row is counted, by witnesses that are not the package's."""

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
    account,
)
from airflow_broadway.testing.crashes.sink import ForkError
from airflow_broadway.testing.crashes.subject import Letter, Subject


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


class Told(Subject):
    """A subject of which a test tells what came of it."""

    def __init__(self, folder: Path, pipeline: type[Broadway] = Sink) -> None:
        super().__init__(pipeline, folder)
        self.dead: list[Letter] = []
        self.there: list[str] | None = None
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
            raise ForkError("torn")
        return None if self.there is None else Counter(self.there)

    def called(
        self,
        *keys: str,
        batch_id: str = "b",
        again: bool = False,
        ended: bool = True,
        succeeded: Sequence[str] | None = None,
    ) -> None:
        """A batch was handled."""
        result = {
            "execution": "one/batch.default/1",
            "stage": "handle_batch",
            "batch_id": batch_id,
            "messages": [(key, 1, again) for key in keys],
        }
        with self.calls_file.open("a") as file:
            file.write(json.dumps({**result, "succeeded": None}) + "\n")
            if ended:
                fine = list(keys if succeeded is None else succeeded)
                file.write(json.dumps({**result, "succeeded": fine}) + "\n")


@pytest.fixture
def result(tmp_path: Path) -> Told:
    return Told(tmp_path)


def wrong(found: Account) -> list[Violation]:
    return [kind for kind in Violation if kind in found.wrong]


def test_a_message_is_acked_or_dead_and_else_lost(result: Told) -> None:
    result.called("a", "b", succeeded=["a"])
    result.dead = [Letter("b", False, "no good")]
    assert account(result, ["a", "b"]).good

    found = account(result, ["a", "b", "c"])
    assert found.fates == {0: ACKED, 1: DEAD, 2: ""}
    assert found.lines == ["lost: c"]
    assert found.reasons == ["no good"]


def test_a_call_that_did_not_return_handled_nothing(result: Told) -> None:
    result.called("a", ended=False)
    assert wrong(account(result, ["a"])) == [Violation.LOST]


def test_another_outcome_than_without_a_strike_is_a_mistake(result: Told) -> None:
    result.called("a")
    assert account(result, ["a"], Account({0: DEAD})).lines == [
        "mistake: a is acked, and should be dead"
    ]


def test_a_callback_that_is_made_to_fail_may_use_up_the_last_attempt(result: Told) -> None:
    result.called("a", "b", succeeded=["a"])
    result.dead = [Letter("b", False)]
    result.there = ["a"]
    expected = Account({0: ACKED, 1: ACKED}, rows=Counter(["a", "b"]))

    struck = ["one/batch.default/1"]
    assert account(result, ["a", "b"], expected, struck).good
    assert wrong(account(result, ["a", "b"], expected, ["one/process/1"])) == [
        Violation.MISSING,
        Violation.OTHER,
    ]
    result.there = ["a", "a"]
    assert wrong(account(result, ["a", "b"], expected, struck)) == [Violation.REPEATED]


@pytest.mark.parametrize("pipeline", [Dropping, WithoutLetters])
def test_what_failed_is_dropped_where_nobody_keeps_it_and_never_what_should_succeed(
    tmp_path: Path, pipeline: type[Broadway]
) -> None:
    result = Told(tmp_path, pipeline)
    result.called("a", succeeded=[])

    assert account(result, ["a"]).fates == {0: DROPPED}
    assert account(result, ["a"], Account({0: DROPPED})).good
    assert wrong(account(result, ["a"], Account({0: ACKED}))) == [Violation.LOST]


def test_a_repetition_must_be_marked(result: Told) -> None:
    result.called("a", batch_id="b1")
    result.called("a", batch_id="b2", again=True)
    assert account(result, ["a"]).good

    result.called("a", batch_id="b3")
    assert wrong(account(result, ["a"])) == [Violation.UNMARKED]


def test_a_batch_comes_again_with_the_same_messages(result: Told) -> None:
    result.called("a", "b")
    result.called("a", "b")
    assert account(result, ["a", "b"]).good

    result.called("a")
    lines = account(result, ["a", "b"]).lines
    assert lines
    assert all(line.endswith("with other messages") for line in lines)


def test_files_that_stay_are_named(result: Told) -> None:
    for name in ("Sink/crashes/one/lease.json", "Sink/crashes/last/lease.json"):
        path = result.work / "staging" / name
        path.parent.mkdir(parents=True)
        path.touch()
    assert account(result, []).lines == ["left over: Sink/crashes/one/lease.json"]


def test_rows_are_compared_with_those_of_a_run_that_was_not_struck(result: Told) -> None:
    result.there = ["1", "1", "3"]

    found = account(result, [], Account(rows=Counter(["1", "2"])))

    assert found.lines == [
        "missing in the sink: 2 is there nowhere, and should be once",
        "repeated in the sink: 1 is there twice, and should be once",
        "repeated in the sink: 3 is there once, and should be nowhere",
    ]
    assert account(result, [], Account(rows=Counter(["1", "1", "3"]))).good


def test_a_sink_that_cannot_be_read_is_a_mistake_of_its_case(result: Told) -> None:
    result.fails = True
    assert account(result, []).lines == ["mistake: the sink cannot be read: torn"]
