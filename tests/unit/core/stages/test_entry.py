"""Messages enter the processors: what a transformer may make of them, and what fails alone."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway import Message, Processors
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.stages.entry import EntryFailure, MessageEntry, is_entry_failure
from airflow_broadway.core.stages.processor_pool import ProcessorPool
from airflow_broadway.testing import DummyProducer, PipelineDriver
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
    _, made = MessageEntry(Plain(), transformer).enter(message)
    return made


def test_a_message_made_anew_keeps_what_it_is_to_its_broker() -> None:
    made = transformed(lambda message: Message(message.data.decode(), batcher="b"))

    assert (made.data, made.batcher) == ("data", "b")
    # Without its attempt it would be retried for ever; without the mark a repetition goes unseen.
    assert (made.message_id, made.attempt, made.redelivered) == ("m-1", 3, True)
    assert (made.received_at, made.position, made.size) == (DELIVERED.received_at, 7, 4)
    assert made.acknowledger == DELIVERED.acknowledger


def test_a_message_changed_by_its_functions_is_passed_on_as_it_is() -> None:
    made = transformed(lambda message: message.put_data(1).put_batch_key("k"))
    assert (made.data, made.batch_key, made.attempt) == (1, "k", 3)


def _raises(error: BaseException) -> Callable[[Any], Any]:
    def raises(message: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize(
    ("transformer", "reason"),
    [
        (
            lambda message: Message(message.data, message_id="order-1"),
            "must keep the message_id: it changed 'm-1' to 'order-1'",
        ),
        (lambda message: b"raw", "must return a message, got: b'raw'"),
        (_raises(ValueError("17")), "ValueError: 17"),
        (_raises(SystemExit(3)), "SystemExit: 3"),
        (_raises(asyncio.CancelledError()), "CancelledError"),
        (_raises(GeneratorExit()), "GeneratorExit"),
    ],
)
def test_a_transformer_fails_its_message_alone(
    transformer: Callable[[Any], Any], reason: str
) -> None:
    made = transformed(transformer)

    assert is_entry_failure(made)
    assert reason in made.status.text
    assert (made.message_id, made.data) == ("m-1", b"data")


def test_an_entry_failure_stays_one_in_another_process() -> None:
    failure = EntryFailure("error", ValueError("17"), "trace")
    assert type(pickle.loads(pickle.dumps(failure))) is EntryFailure


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), type("TaskTimeout", (BaseException,), {})()]
)
def test_what_ends_the_task_goes_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        transformed(_raises(error))


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
def test_partition_by_fails_its_message_alone(inline: bool) -> None:
    driver = PipelineDriver(Plain)
    pool = ProcessorPool(Partitioned(), inline=inline)
    try:
        done = list(pool.map([[driver.message(number) for number in range(60)]]))
    finally:
        pool.close()
    failed = {m.data: m.status.text for _, result in done for m in result.failed}
    assert failed.keys() == {3, 35}
    assert failed[35] == "ValueError: 35"
    assert "must return an integer of at least 0, got: 'three'" in failed[3]
    assert sum(len(result.successful) for _, result in done) == 58


def test_entry_failures_reach_handle_failed() -> None:
    driver = PipelineDriver(Plain)
    pipeline = Checked()
    pool = ProcessorPool(pipeline, transformer=_raises(ValueError("no")))
    try:
        [(_, result)] = pool.map([[driver.message(1), driver.message(2)]])
    finally:
        pool.close()
    assert pipeline.failed_with == [1, 2]
    assert [message.status.kind for message in result.failed] == ["error", "error"]


class OrderedProducer(DummyProducer):
    """Keeps the order of the first letter of a message's data."""

    @property
    def keeps_order(self) -> bool:
        return True

    def group_of(self, message: Message) -> str | None:
        return str(message.data)[0]


class Ordered(Passing):
    producer = OrderedProducer()
    processors = Processors(concurrency=1)

    def prepare_messages(self, messages: list[Message], context: Any) -> list[Message]:
        return messages


def test_an_entry_failure_holds_back_what_is_behind_it_in_its_group() -> None:
    def transformer(message: Message) -> Message:
        if message.data == "a2":
            raise ValueError("a2")
        return message

    driver = PipelineDriver(Plain)
    pool = ProcessorPool(Ordered(), transformer=transformer)
    chunk = [driver.message(data) for data in ("a1", "b1", "a2", "b2", "a3")]
    try:
        [(_, result)] = pool.map([chunk])
    finally:
        pool.close()
    assert [message.data for message in result.successful] == ["a1", "b1", "b2"]
    assert [message.data for message in result.failed] == ["a2"]  # and a3 has no result
