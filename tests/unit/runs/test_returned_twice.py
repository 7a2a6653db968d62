"""A message is settled once, however often a callback returns it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow_broadway import Message
from tests.unit.runs.steps import PlainSums, Run, Sums


class Twice(Sums):
    """``handle_failed`` returns each failure twice."""

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        return [*messages, *messages]


class PlainTwice(Twice, PlainSums):
    """The same without batchers."""


class Both(Sums):
    """``handle_batch`` returns what it fails as a success too."""

    def handle_batch(self, batcher: str, messages: Any, batch_info: Any, context: Any) -> Any:
        return [*super().handle_batch(batcher, messages, batch_info, context), *messages]


def settled(folder: Path, pipeline: type[Sums]) -> tuple[dict[str, int], list[int]]:
    """The account of a run of the numbers 1 to 10, and its dead letters."""
    run = Run(folder, pipeline=pipeline)
    run.send(range(1, 11))
    run.batch(run.process())
    report = run.ack()
    assert report["balanced"]
    return {name: count for name, count in report["totals"].items() if count}, run.dead()


def test_by_handle_failed_in_both_stages(tmp_path: Path) -> None:
    assert settled(tmp_path, Twice) == (
        {"received": 10, "failed": 3, "acked": 7, "dead_lettered": 3, "accounted": 10},
        [5, 7, 10],
    )


def test_by_handle_failed_without_batchers(tmp_path: Path) -> None:
    assert settled(tmp_path, PlainTwice) == (
        {"received": 10, "failed": 1, "acked": 9, "dead_lettered": 1, "accounted": 10},
        [7],
    )


def test_as_a_success_and_as_a_failure(tmp_path: Path) -> None:
    # Then it failed: what was meant to be looked at is not acknowledged away
    assert settled(tmp_path, Both)[1] == [5, 7, 10]
