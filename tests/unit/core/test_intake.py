"""What a transformer may make of a delivery, and what a broken source leaves behind."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_broadway.core.errors import PipelineError, ProducerUnavailable
from airflow_broadway.core.intake import Budget, Intake, transformed
from airflow_broadway.core.message import AckRef, Message
from airflow_broadway.core.options import RateLimiting
from airflow_broadway.core.rate_limiter import RateLimiter
from airflow_broadway.testing import ManualClock

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


def test_a_message_made_anew_keeps_what_it_is_to_its_broker() -> None:
    [made] = transformed(lambda message: Message(message.data.decode(), batcher="b"), [DELIVERED])

    assert (made.data, made.batcher) == ("data", "b")
    # Without its attempt it would be retried for ever; without the mark a repetition goes unseen.
    assert (made.message_id, made.attempt, made.redelivered) == ("m-1", 3, True)
    assert (made.received_at, made.position, made.size) == (DELIVERED.received_at, 7, 4)
    assert made.acknowledger == DELIVERED.acknowledger


def test_a_message_changed_by_its_functions_is_passed_on_as_it_is() -> None:
    [made] = transformed(lambda message: message.put_data(1).put_batch_key("k"), [DELIVERED])
    assert (made.data, made.batch_key, made.attempt) == (1, "k", 3)


def test_another_message_id_is_refused_before_any_work_is_done() -> None:
    def renames(message: Any) -> Message:
        return Message(message.data, message_id="order-1")

    with pytest.raises(
        PipelineError, match=r"must keep the message_id: it made 'order-1' of 'm-1'"
    ):
        transformed(renames, [DELIVERED])


class _Broken:
    """A source whose broker has gone."""

    def receive(self, demand: int, timeout: float) -> list[Message]:
        raise ProducerUnavailable("the broker has gone")

    def secure(self, messages: list[Message]) -> list[Message]:
        return messages


def test_what_could_not_be_received_is_given_back_to_the_rate_limit() -> None:
    limiter = RateLimiter(RateLimiting(allowed_messages=10, interval=60.0), ManualClock())
    source: Any = _Broken()
    intake = Intake(source, Budget(), clock=ManualClock(), limiter=limiter, demand=8)

    with pytest.raises(ProducerUnavailable):
        next(iter(intake))

    # The retry of the task has the whole window.
    assert limiter.take(100) == 10
