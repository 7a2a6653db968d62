"""The pytest fixture runs a crash test in a separate process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Batcher, BatchInfo, Broadway, Message
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.testing.crashes.campaign import Totals
from airflow_broadway.testing.crashes.users import CrashTestError

KILLED = "one/batch.default/1 handle_batch default #1: killed after [retry]"


class Appends(Broadway):
    """Appends rows, so that a repeated batch duplicates them."""

    producer = SqliteProducer(queue="q", path="/given")
    batchers = {"default": Batcher(engine="python", batch_size=10)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data(int(message.data))

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        with open("rows.jsonl", "a") as file:
            file.writelines(f"{json.dumps(message.data)}\n" for message in messages)
        return messages


class Fails(Appends):
    """Fails every message."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        raise ValueError("no good")


def rows(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_a_failed_crash_test_raises_an_assertion_with_the_report(
    broadway_crash_test: Callable[..., Totals],
) -> None:
    with pytest.raises(AssertionError, match="1 is there twice, and should be once") as raised:
        broadway_crash_test(Appends, ["1"], sink=rows, only=[KILLED])
    assert f"only=[{KILLED!r}]" in str(raised.value)


def test_a_passed_crash_test_returns_its_totals(broadway_crash_test: Callable[..., Totals]) -> None:
    totals = broadway_crash_test(
        Appends, [b"1"], sink=rows, only=[KILLED.replace("after", "before")]
    )
    assert (totals.cases, len(totals.points), totals.passed) == (1, 1, True)


def test_a_pipeline_that_fails_every_message_is_rejected(
    broadway_crash_test: Callable[..., Totals],
) -> None:
    with pytest.raises(CrashTestError, match="use messages that this pipeline can handle") as error:
        broadway_crash_test(Fails, ["1"])
    assert "no good" in str(error.value)


def test_functions_that_another_process_cannot_import_are_rejected(
    broadway_crash_test: Callable[..., Totals],
) -> None:
    with pytest.raises(CrashTestError, match="define it at the top of its module"):
        broadway_crash_test(Appends, ["1"], sink=lambda folder: [])
