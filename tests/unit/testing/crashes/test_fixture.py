"""The fixture of pytest puts a pipeline to the test in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_broadway import Batcher, BatchInfo, Broadway, Message
from airflow_broadway.producers.sqlite import SqliteProducer
from airflow_broadway.testing.crashes.campaign import Sums
from airflow_broadway.testing.crashes.users import CrashTestError

KILLED = "one/batch.default/1 handle_batch default #1: killed after [retry]"


class Appends(Broadway):
    """Its sink has what comes again twice."""

    producer = SqliteProducer(queue="q", path="/given")
    batchers = {"default": Batcher(engine="python", batch_size=10)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message.put_data(int(message.data))

    def handle_batch(self, batcher: str, messages: Any, batch_info: BatchInfo, context: Any) -> Any:
        with open("rows.jsonl", "a") as file:
            file.writelines(f"{json.dumps(message.data)}\n" for message in messages)
        return messages


class Fails(Appends):
    """It can handle nothing."""

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        raise ValueError("no good")


def rows(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_what_fails_is_an_assertion_with_the_report(
    broadway_crash_test: Callable[..., Sums],
) -> None:
    with pytest.raises(AssertionError, match="1 is there twice, and should be once") as raised:
        broadway_crash_test(Appends, ["1"], sink=rows, only=[KILLED])
    assert f"only=[{KILLED!r}]" in str(raised.value)


def test_what_is_fine_gives_the_sums(broadway_crash_test: Callable[..., Sums]) -> None:
    sums = broadway_crash_test(Appends, [b"1"], sink=rows, only=[KILLED.replace("after", "before")])
    assert (sums.cases, len(sums.points), sums.good) == (1, 1, True)


def test_a_pipeline_that_fails_every_message_is_told_so(
    broadway_crash_test: Callable[..., Sums],
) -> None:
    with pytest.raises(CrashTestError, match="use messages that this pipeline can handle") as error:
        broadway_crash_test(Fails, ["1"])
    assert "no good" in str(error.value)


def test_what_another_process_cannot_import_is_refused(
    broadway_crash_test: Callable[..., Sums],
) -> None:
    with pytest.raises(CrashTestError, match="define it at the top of its module"):
        broadway_crash_test(Appends, ["1"], sink=lambda folder: [])
