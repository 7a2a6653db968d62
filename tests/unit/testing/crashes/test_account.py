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
        told = {
            "execution": "one/batch.default/1",
            "stage": "handle_batch",
            "batch_id": batch_id,
            "messages": [(key, 1, again) for key in keys],
        }
        with self.calls_file.open("a") as file:
            file.write(json.dumps({**told, "succeeded": None}) + "\n")
            if ended:
                fine = list(keys if succeeded is None else succeeded)
                file.write(json.dumps({**told, "succeeded": fine}) + "\n")


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def wrong(found: Account) -> list[Violation]:
    return [kind for kind in Violation if kind in found.wrong]


def test_a_message_is_acked_or_dead_and_else_lost(told: Told) -> None:
    told.called("a", "b", succeeded=["a"])
    told.dead = [Letter("b", False, "no good")]
    assert account(told, ["a", "b"]).good

    found = account(told, ["a", "b", "c"])
    assert found.fates == {0: ACKED, 1: DEAD, 2: ""}
    assert found.lines == ["lost: c"]
    assert found.reasons == ["no good"]


def test_a_call_that_did_not_return_handled_nothing(told: Told) -> None:
    told.called("a", ended=False)
    assert wrong(account(told, ["a"])) == [Violation.LOST]


def test_another_outcome_than_without_a_strike_is_a_mistake(told: Told) -> None:
    told.called("a")
    assert account(told, ["a"], Account({0: DEAD})).lines == [
        "mistake: a is acked, and should be dead"
    ]


def test_a_callback_that_is_made_to_fail_may_use_up_the_last_attempt(told: Told) -> None:
    told.called("a", "b", succeeded=["a"])
    told.dead = [Letter("b", False)]
    told.there = ["a"]
    expected = Account({0: ACKED, 1: ACKED}, rows=Counter(["a", "b"]))

    struck = ["one/batch.default/1"]
    assert account(told, ["a", "b"], expected, struck).good
    assert wrong(account(told, ["a", "b"], expected, ["one/process/1"])) == [
        Violation.MISSING,
        Violation.OTHER,
    ]
    told.there = ["a", "a"]
    assert wrong(account(told, ["a", "b"], expected, struck)) == [Violation.REPEATED]


@pytest.mark.parametrize("pipeline", [Dropping, WithoutLetters])
def test_what_failed_is_dropped_where_nobody_keeps_it_and_never_what_should_succeed(
    tmp_path: Path, pipeline: type[Broadway]
) -> None:
    told = Told(tmp_path, pipeline)
    told.called("a", succeeded=[])

    assert account(told, ["a"]).fates == {0: DROPPED}
    assert account(told, ["a"], Account({0: DROPPED})).good
    assert wrong(account(told, ["a"], Account({0: ACKED}))) == [Violation.LOST]


def test_a_repetition_must_be_marked(told: Told) -> None:
    told.called("a", batch_id="b1")
    told.called("a", batch_id="b2", again=True)
    assert account(told, ["a"]).good

    told.called("a", batch_id="b3")
    assert wrong(account(told, ["a"])) == [Violation.UNMARKED]


def test_a_batch_comes_again_with_the_same_messages(told: Told) -> None:
    told.called("a", "b")
    told.called("a", "b")
    assert account(told, ["a", "b"]).good

    told.called("a")
    lines = account(told, ["a", "b"]).lines
    assert lines
    assert all(line.endswith("with other messages") for line in lines)


def test_files_that_stay_are_named(told: Told) -> None:
    for name in ("Sink/crashes/one/lease.json", "Sink/crashes/last/lease.json"):
        path = told.work / "staging" / name
        path.parent.mkdir(parents=True)
        path.touch()
    assert account(told, []).lines == ["left over: Sink/crashes/one/lease.json"]


def test_rows_are_compared_with_those_of_a_run_that_was_not_struck(told: Told) -> None:
    told.there = ["1", "1", "3"]

    found = account(told, [], Account(rows=Counter(["1", "2"])))

    assert found.lines == [
        "missing in the sink: 2 is there nowhere, and should be once",
        "repeated in the sink: 1 is there twice, and should be once",
        "repeated in the sink: 3 is there once, and should be nowhere",
    ]
    assert account(told, [], Account(rows=Counter(["1", "1", "3"]))).good


def test_a_sink_that_cannot_be_read_is_a_mistake_of_its_case(told: Told) -> None:
    told.fails = True
    assert account(told, []).lines == ["mistake: the sink cannot be read: torn"]
