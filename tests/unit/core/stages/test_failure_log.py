"""The log of a run's failures."""

from __future__ import annotations

import logging
import pickle
from typing import Any

from airflow_broadway import Batcher, Message, Processors
from airflow_broadway.core.model.message import Status
from airflow_broadway.core.stages import callbacks
from airflow_broadway.core.stages.failure_log import name_messages
from airflow_broadway.testing import DummyProducer
from tests.unit.passing import Passing


class Failing(Passing):
    producer = DummyProducer()
    processors = Processors(concurrency=1)
    batchers = {"default": Batcher(engine="python", batch_size=10)}

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        if message.data % 5 == 0:
            return message.failed("a multiple of five")
        if message.data % 2:
            raise ValueError(f"odd: {message.data}")
        return message


def test_first_ten_failures_are_logged_in_full_and_all_in_a_table(caplog):
    with caplog.at_level(logging.ERROR):
        report = Failing().run_local(range(1000))

    assert report.failed == 600
    in_full = [record for record in caplog.records if record.exc_info]
    assert len(in_full) == 10
    # Which message it was, and the type of the exception
    assert in_full[0].getMessage() == (
        "Failing.handle_message failed message 'given-1': ValueError: odd: 1"
    )
    # Those that differ in numbers alone are one reason
    assert caplog.records[-1].getMessage().splitlines() == [
        "600 messages failed in this run, by reason:",
        "        400  ValueError: odd: 1",
        "        200  a multiple of five",
    ]
    assert len(caplog.records) == 12  # the hundredth was logged too


def test_each_kind_of_failure_is_logged(caplog):
    class Both(Failing):
        def handle_batch(self, batcher, messages, batch_info, context):
            raise KeyError(batch_info.batch_id)

    with caplog.at_level(logging.ERROR):
        Both().run_local(range(1000))
    kinds = {record.exc_info[0] for record in caplog.records if record.exc_info}
    assert kinds == {ValueError, KeyError}


def test_exception_without_text_is_named(monkeypatch):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    class Silent(Failing):
        def handle_message(self, processor, message, context):
            raise KeyError if message.data else Odd

    # No handler receives the lines: some would read the text of the exception.
    lines: list[str] = []
    monkeypatch.setattr(
        callbacks.log, "error", lambda text, *values, **_: lines.append(text % values)
    )
    Silent().run_local([0, 1])
    assert lines[0].endswith("failed message 'given-0': Odd: (its text cannot be had)")
    assert lines[1].endswith("failed message 'given-1': KeyError")


def test_list_used_as_dataframe_is_explained(caplog):
    class Writing(Passing):
        producer = DummyProducer()
        batchers = {"default": Batcher(engine="python")}

        def handle_batch(self, batcher, messages, batch_info, context):
            return messages.write.parquet("/nowhere")

    class OwnList(Writing):
        def handle_batch(self, batcher, messages, batch_info, context):
            return [].write  # type: ignore[attr-defined]

    with caplog.at_level(logging.ERROR):
        [reason] = Writing().run_local([1]).reasons
        [own] = OwnList().run_local([1]).reasons

    assert reason["reason"] == (
        "AttributeError: 'list' object has no attribute 'write': with engine='python' handle_batch"
        " gets a list of messages; a DataFrame comes with Batcher(engine='spark')"
    )
    assert own["reason"] == "AttributeError: 'list' object has no attribute 'write'"
    assert any(
        record.exc_info and reason["reason"] in record.getMessage() for record in caplog.records
    )


def test_pickled_status_keeps_its_traceback():
    try:
        raise ValueError("here")
    except ValueError as error:
        status = Status("error", error)
    assert 'raise ValueError("here")' in pickle.loads(pickle.dumps(status)).stacktrace


def test_more_than_ten_messages_are_named_by_the_first_ten():
    ids = [f"m{number}" for number in range(11)]
    assert name_messages(ids[:1]) == "message 'm0'"
    first = ", ".join(map(repr, ids[:10]))
    assert name_messages(ids[:10]) == f"10 messages ({first})"
    assert name_messages(ids) == f"11 messages ({first}, …)"
