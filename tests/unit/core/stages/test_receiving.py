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


def test_every_item_that_is_no_message_is_found_not_the_first_alone() -> None:
    items: Any = [Message(b"1"), Message(b"2"), b"raw"]
    with pytest.raises(PipelineError, match=r"message.*, got: b'raw'"):
        check_messages(items)


class _Broken:
    """A source whose broker has gone."""

    def receive(self, demand: int, timeout: float) -> list[Message]:
        raise ProducerUnavailable("the broker has gone")

    def secure(self, messages: list[Message]) -> list[Message]:
        return messages

    def stop(self) -> list[Message]:
        return []


def test_what_could_not_be_received_is_given_back_to_the_rate_limit() -> None:
    limiter = RateLimiter(RateLimiting(allowed_messages=10, interval=60.0), ManualClock())
    source: Any = _Broken()
    intake = Receiving(source, Budget(), clock=ManualClock(), limiter=limiter, demand=8)

    with pytest.raises(ProducerUnavailable):
        next(iter(intake))

    # The retry of the task has the whole window.
    assert limiter.take(100) == 10


class _Told(_Broken):
    """A source of which the run is reason to stop while it waits."""

    reason = ""

    def receive(self, demand: int, timeout: float) -> list[Message]:
        self.reason = "signal"
        return []


def test_what_is_told_to_stop_while_nothing_comes_has_not_found_the_queue_empty() -> None:
    source: Any = _Told()
    clock = ManualClock()
    intake = Receiving(
        source,
        Budget(),
        clock=clock,
        limiter=RateLimiter(None, clock),
        demand=8,
        stop_reason=lambda: source.reason,
    )

    assert list(intake) == []
    assert intake.ended == "signal"


class _Asked(_Broken):
    """A source without end, which notes what it is asked for."""

    def __init__(self, size: int = 1) -> None:
        self.asked: list[int] = []
        self.size = size

    def receive(self, demand: int, timeout: float) -> list[Message]:
        self.asked.append(demand)
        return [Message(b"x", size=self.size)] * demand


@pytest.mark.parametrize(
    ("processors", "seconds", "asked"),
    [
        (10, 0.0, [10, 40, 160, 640, 1000, 1000]),  # four times as much as before, up to 1,000
        (10, 0.1, [10, 10, 10, 10, 10, 10]),  # no less than the processors take
        (10, 0.001, [10, 40, 160, 500, 500, 500]),  # as much as takes half a second
        (1500, 0.0, [1500, 1500, 1500, 1500, 1500, 1500]),  # more, if the processors can take it
    ],
)
def test_a_source_is_asked_for_half_a_seconds_work_and_at_most_1000_messages(
    processors: int, seconds: float, asked: list[int]
) -> None:
    source: Any = _Asked()
    clock = ManualClock()
    intake = Receiving(source, Budget(), clock=clock, limiter=RateLimiter(None), demand=processors)

    for dispatch in intake:
        # What is handed out at a time is what the processors can take
        assert 0 < len(dispatch) <= processors
        if len(source.asked) > len(asked):
            break
        clock.advance(len(dispatch) * seconds)

    assert source.asked[: len(asked)] == asked


@pytest.mark.parametrize(
    ("size", "seconds", "asked"),
    [
        (0, 0.0, [500, 2000, 4000, 4000]),
        (1024, 0.0, [500, 2000, 4000, 4000]),
        (2048, 0.0, [500, 2000, 2048, 2048]),  # 4 MiB of them
        (10_000_000, 0.0, [500, 1000, 1000, 1000]),  # no less than of any producer
        (1, 0.0002, [500, 2000, 2500, 2500]),  # half a second's work all the same
    ],
)
def test_a_producer_may_want_more_at_once_of_small_messages(
    size: int, seconds: float, asked: list[int]
) -> None:
    source: Any = _Asked(size)
    clock = ManualClock()
    limiter = RateLimiter(None)
    intake = Receiving(source, Budget(), clock=clock, limiter=limiter, demand=500, most=4000)

    for dispatch in intake:
        assert len(dispatch) <= 500
        if len(source.asked) > len(asked):
            break
        clock.advance(len(dispatch) * seconds)

    assert source.asked[: len(asked)] == asked


class _Securing(_Broken):
    """A source that secures all but the first of what it receives, once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.left = [Message(b"%d" % number, size=1) for number in range(3)]

    def receive(self, demand: int, timeout: float) -> list[Message]:
        self.calls.append("receive")
        given, self.left = self.left, []
        return given

    def secure(self, messages: list[Message]) -> list[Message]:
        self.calls.append(f"secure {len(messages)}")
        return messages[1:]


def test_only_what_is_secured_goes_on_and_only_then() -> None:
    source: Any = _Securing()
    clock = ManualClock()

    def accept(messages: Any) -> Any:
        source.calls.append(f"accept {len(messages)}")
        return messages

    limiter = RateLimiter(None, clock)
    intake = Receiving(source, Budget(), clock=clock, limiter=limiter, demand=8, accept=accept)
    assert [message.data for dispatch in intake for message in dispatch] == [b"1", b"2"]
    assert source.calls[:3] == ["receive", "secure 3", "accept 2"]
    assert source.calls[3:5] == [
        "receive",
        "secure 0",
    ]  # nothing is reason too: the source drains by it
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
def test_a_run_knows_how_long_messages_had_waited(
    receipts: list[list[Any]], waited: dict[str, float]
) -> None:
    source: Any = _Late(*receipts)
    clock = ManualClock()
    intake = Receiving(
        source,
        Budget(),
        clock=clock,
        limiter=RateLimiter(None, clock),
        demand=8,
        enqueued_at=_enqueued,
    )

    list(intake)

    assert intake.lag == waited
