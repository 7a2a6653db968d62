"""Receiving within a budget, and what a broken source leaves behind."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_broadway.core.errors import PipelineError, ProducerUnavailable
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.pipeline_options import RateLimiting
from airflow_broadway.core.stages.rate_limiter import RateLimiter
from airflow_broadway.core.stages.receiving import Budget, Receiving, check_messages
from airflow_broadway.testing import ManualClock


def test_non_message_is_refused():
    items: Any = [Message(b"1"), Message(b"2"), b"raw"]
    with pytest.raises(PipelineError, match=r"message.*, got: b'raw'"):
        check_messages(items)


def receiving(source: Any, clock: ManualClock, **options: Any) -> Receiving:
    options = {"limiter": RateLimiter(None, clock), "demand": 8, **options}
    return Receiving(source, Budget(), clock=clock, **options)


class _Broken:
    """A source whose broker is down."""

    def receive(self, demand: int, timeout: float) -> list[Message]:
        raise ProducerUnavailable("the broker has gone")

    def secure(self, messages: list[Message]) -> list[Message]:
        return messages

    def stop(self) -> list[Message]:
        return []


def test_failed_receive_refunds_the_rate_limit():
    limiter = RateLimiter(RateLimiting(allowed_messages=10, interval=60.0), ManualClock())
    source: Any = _Broken()
    intake = receiving(source, ManualClock(), limiter=limiter)

    with pytest.raises(ProducerUnavailable):
        next(iter(intake))

    # The retry of the task has the whole window.
    assert limiter.take(100) == 10


class _Stopping(_Broken):
    """A source during whose wait the run is stopped."""

    reason = ""

    def receive(self, demand: int, timeout: float) -> list[Message]:
        self.reason = "signal"
        return []


def test_stop_while_waiting_is_not_an_empty_queue():
    source: Any = _Stopping()
    intake = receiving(source, ManualClock(), stop_reason=lambda: source.reason)

    assert list(intake) == []
    assert intake.ended == "signal"


class _Endless(_Broken):
    """A source without end that records the demand."""

    def __init__(self, size: int = 1) -> None:
        self.demands: list[int] = []
        self.size = size

    def receive(self, demand: int, timeout: float) -> list[Message]:
        self.demands.append(demand)
        return [Message(b"x", size=self.size)] * demand


@pytest.mark.parametrize(
    ("processors", "seconds", "demands"),
    [
        (10, 0.0, [10, 40, 160, 640, 1000, 1000]),  # four times as much as before, up to 1,000
        (10, 0.1, [10, 10, 10, 10, 10, 10]),  # no less than the processors take
        (10, 0.001, [10, 40, 160, 500, 500, 500]),  # as much as takes half a second
        (1500, 0.0, [1500, 1500, 1500, 1500, 1500, 1500]),  # more, if the processors can take it
    ],
)
def test_demand_is_half_a_second_of_work_up_to_1000_messages(processors, seconds, demands):
    source: Any = _Endless()
    clock = ManualClock()
    intake = receiving(source, clock, demand=processors)

    for dispatch in intake:
        # What is handed out at a time is what the processors can take
        assert 0 < len(dispatch) <= processors
        if len(source.demands) > len(demands):
            break
        clock.advance(len(dispatch) * seconds)

    assert source.demands[: len(demands)] == demands


@pytest.mark.parametrize(
    ("size", "seconds", "demands"),
    [
        (0, 0.0, [500, 2000, 4000, 4000]),
        (1024, 0.0, [500, 2000, 4000, 4000]),
        (2048, 0.0, [500, 2000, 2048, 2048]),  # 4 MiB of them
        (10_000_000, 0.0, [500, 1000, 1000, 1000]),  # no less than of any producer
        (1, 0.0002, [500, 2000, 2500, 2500]),  # half a second's work all the same
    ],
)
def test_producer_may_request_more_small_messages(size, seconds, demands):
    source: Any = _Endless(size)
    clock = ManualClock()
    intake = receiving(source, clock, demand=500, most=4000)

    for dispatch in intake:
        assert len(dispatch) <= 500
        if len(source.demands) > len(demands):
            break
        clock.advance(len(dispatch) * seconds)

    assert source.demands[: len(demands)] == demands


class _Securing(_Broken):
    """A source that secures all but the first of what it receives, once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.left = [Message(b"%d" % number, size=1) for number in range(3)]

    def receive(self, demand: int, timeout: float) -> list[Message]:
        self.calls.append("receive")
        received, self.left = self.left, []
        return received

    def secure(self, messages: list[Message]) -> list[Message]:
        self.calls.append(f"secure {len(messages)}")
        return messages[1:]


def test_only_secured_messages_are_dispatched():
    source: Any = _Securing()
    clock = ManualClock()

    def accept(messages):
        source.calls.append(f"accept {len(messages)}")
        return messages

    intake = receiving(source, clock, accept=accept)
    assert [message.data for dispatch in intake for message in dispatch] == [b"1", b"2"]
    assert source.calls[:3] == ["receive", "secure 3", "accept 2"]
    assert source.calls[3:5] == ["receive", "secure 0"]  # an empty call drains the source
    assert intake.received == 2


# -- how long messages had waited ------------------------------------------------------------------

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class _Late(_Broken):
    """A source of messages that got to their broker some seconds ago, a few at a time."""

    def __init__(self, *receipts: list[Any]) -> None:
        self.receipts = list(receipts)

    def receive(self, demand: int, timeout: float) -> list[Message]:
        ages = self.receipts.pop(0) if self.receipts else []
        return [Message(b"x", metadata={"age": age}, received_at=NOON) for age in ages]


def _enqueued(message: Message) -> datetime | None:
    age = message.metadata["age"]
    if age == "no time zone":
        return datetime.fromisoformat("2026-01-01T00:00:00")
    return None if age is None else NOON - timedelta(seconds=age)


@pytest.mark.parametrize(
    ("receipts", "waited"),
    [
        ([[3.0, 2.0], [5.0, 1.0], [4.0]], {"waited": 5.0}),
        ([[1.0, 9.0, 2.0]], {"waited": 2.0}),  # by the first and the last of each receipt
        ([[-7.0]], {"waited": 0.0}),  # clocks differ
        ([[None], ["no time zone"], [1e18], [-7200.0]], {}),  # anybody's: it is not known
        ([[None], [0.5]], {"waited": 0.5}),
        ([], {}),
    ],
)
def test_waiting_time_of_messages_is_measured(receipts, waited):
    source: Any = _Late(*receipts)
    intake = receiving(source, ManualClock(), enqueued_at=_enqueued)

    list(intake)

    assert intake.lag == waited
