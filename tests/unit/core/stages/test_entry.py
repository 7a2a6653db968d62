"""Messages enter the processors: what a transformer may make of them, and what fails alone."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import pytest

from airflow_broadway import Message, Processors
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.stages.entry import EntryFailure, MessageEntry, is_entry_failure
from airflow_broadway.core.stages.processor_pool import ProcessorPool
from airflow_broadway.testing import DummyProducer, PipelineDriver
from tests.unit.core.stages._killers import OrderedProducer
from tests.unit.passing import Passing

DELIVERED = Message(
    b"data",
    message_id="m-1",
    acknowledger=AckRef(object(), "ref", "receipt"),
    attempt=3,
    redelivered=True,
    received_at=datetime(2026, 1, 1, tzinfo=UTC),
    position=7,
    size=4,
)


class Plain(Passing):
    producer = DummyProducer()


def transformed(transformer: Callable[[Any], Any], message: Message = DELIVERED) -> Message:
    _, message = MessageEntry(Plain(), transformer).enter(message)
    return message


def test_recreated_message_keeps_its_delivery():
    message = transformed(lambda message: Message(message.data.decode(), batcher="b"))

    assert (message.data, message.batcher) == ("data", "b")
    # Without its attempt it would be retried for ever; without the mark a repetition goes unseen.
    assert (message.message_id, message.attempt, message.redelivered) == ("m-1", 3, True)
    assert (message.received_at, message.position) == (DELIVERED.received_at, 7)
    assert message.size == 4
    assert message.acknowledger == DELIVERED.acknowledger


def test_changed_message_is_passed_on():
    message = transformed(lambda message: message.put_data(1).put_batch_key("k"))
    assert (message.data, message.batch_key, message.attempt) == (1, "k", 3)


def _raising(error: BaseException) -> Callable[[Any], Any]:
    return mock.Mock(side_effect=error)


@pytest.mark.parametrize(
    ("transformer", "reason"),
    [
        (
            lambda message: Message(message.data, message_id="order-1"),
            "must keep the message_id: it changed 'm-1' to 'order-1'",
        ),
        (lambda message: b"raw", "must return a message, got: b'raw'"),
        (_raising(ValueError("17")), "ValueError: 17"),
        (_raising(SystemExit(3)), "SystemExit: 3"),
        (_raising(asyncio.CancelledError()), "CancelledError"),
        (_raising(GeneratorExit()), "GeneratorExit"),
    ],
)
def test_transformer_fails_its_message_alone(transformer, reason):
    message = transformed(transformer)

    assert is_entry_failure(message)
    assert reason in message.status.text
    assert (message.message_id, message.data) == ("m-1", b"data")


def test_entry_failure_survives_pickling():
    failure = EntryFailure("error", ValueError("17"), "trace")
    assert type(pickle.loads(pickle.dumps(failure))) is EntryFailure


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), type("TaskTimeout", (BaseException,), {})()]
)
def test_interrupt_in_a_transformer_propagates(error):
    with pytest.raises(type(error)):
        transformed(_raising(error))


def _lane(message: Message) -> Any:
    if message.data == 35:
        raise ValueError("35")
    return "three" if message.data == 3 else 0


class Partitioned(Plain):
    processors = Processors(concurrency=2, max_demand=10, partition_by=_lane)


class Checked(Plain):
    processors = Processors(concurrency=1)
    failed_with: list[int]

    def handle_failed(self, messages: list[Message], context: Any) -> list[Message]:
        self.failed_with = [message.data for message in messages]
        return messages


@pytest.mark.parametrize("inline", [True, False])
def test_partition_by_fails_its_message_alone(inline):
    driver = PipelineDriver(Plain)
    with closing(ProcessorPool(Partitioned(), inline=inline)) as pool:
        results = list(pool.map([[driver.message(number) for number in range(60)]]))
    failed = {m.data: m.status.text for _, result in results for m in result.failed}
    assert failed.keys() == {3, 35}
    assert failed[35] == "ValueError: 35"
    assert "must return an integer of at least 0, got: 'three'" in failed[3]
    assert sum(len(result.successful) for _, result in results) == 58


def test_entry_failures_reach_handle_failed():
    driver = PipelineDriver(Plain)
    pipeline = Checked()
    with closing(ProcessorPool(pipeline, transformer=_raising(ValueError("no")))) as pool:
        [(_, result)] = pool.map([[driver.message(1), driver.message(2)]])
    assert pipeline.failed_with == [1, 2]
    assert [message.status.kind for message in result.failed] == ["error", "error"]


class Ordered(Passing):
    producer = OrderedProducer()
    processors = Processors(concurrency=1)

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        return messages


def test_entry_failure_holds_back_its_group():
    def transformer(message):
        if message.data == "a2":
            raise ValueError("a2")
        return message

    driver = PipelineDriver(Plain)
    chunk = [driver.message(data) for data in ("a1", "b1", "a2", "b2", "a3")]
    with closing(ProcessorPool(Ordered(), transformer=transformer)) as pool:
        [(_, result)] = pool.map([chunk])
    assert [message.data for message in result.successful] == ["a1", "b1", "b2"]
    assert [message.data for message in result.failed] == ["a2"]  # and a3 has no result


def test_interrupted_division_keeps_its_messages_next_to_returned_suspects(monkeypatch):
    def transformer(message):
        if message.data == "b":
            raise KeyboardInterrupt
        return message

    driver = PipelineDriver(Plain)
    dispatch, suspects = [driver.message("a"), driver.message("b")], [driver.message("s")]
    with closing(ProcessorPool(Plain(), transformer=transformer, inline=True)) as pool:
        # Given suspects for which no child process could be started
        monkeypatch.setattr(pool._apart, "take_back", lambda: [suspects.pop()] if suspects else [])
        with pytest.raises(KeyboardInterrupt):
            list(pool.map([dispatch]))
        results = list(pool.map([]))
        done, unhandled = pool.left()

    assert [message.data for chunk, _ in results for message in chunk] == ["s"]
    assert [message.data for message in unhandled] == ["a", "b"]
    assert done == []
