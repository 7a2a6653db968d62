"""The demo's pipeline: where each flight goes, and why some go nowhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_broadway.core.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.custody import Action, Delivery
from airflow_broadway.core.message import AckRef, Message
from airflow_broadway.core.processor import ChunkResult, ProcessorStage
from flights_pipeline import FLIGHT, Flights


class Sink:
    """Keeps the verdicts of the process stage."""

    def __init__(self) -> None:
        self.failed: list[Judged] = []

    def record(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        self.failed += failed

    def settle_now(self, stage: str, successful: list[Judged], failed: list[Judged]) -> None:
        raise AssertionError("nothing is settled at once")


def flight(**changes: Any) -> dict[str, Any]:
    return {
        "year": 2013,
        "month": 1,
        "day": 1,
        "dep_time": 517,
        "sched_dep_time": 515,
        "dep_delay": 2,
        "arr_time": 830,
        "sched_arr_time": 819,
        "arr_delay": 11,
        "carrier": "UA",
        "flight": 1545,
        "tailnum": "N14228",
        "origin": "EWR",
        "dest": "IAH",
        "air_time": 227,
        "distance": 1400,
        "hour": 5,
        "minute": 15,
        "time_hour": "2013-01-01T10:00:00Z",
        **changes,
    }


def handle(*bodies: bytes) -> tuple[ChunkResult, Sink]:
    pipeline, sink = Flights(), Sink()
    ack = AckRef(RunAcknowledger(pipeline.producer, sink), "generation", Delivery())
    chunk = [
        Message(body, message_id=str(number), acknowledger=ack)
        for number, body in enumerate(bodies)
    ]
    return ProcessorStage(pipeline).handle(chunk), sink


def handle_flight(**changes: Any) -> Message:
    result, _ = handle(json.dumps(flight(**changes)).encode())
    [message] = result.successful
    return message


@pytest.mark.parametrize(
    ("delay", "batcher"), [(-20, "on_time"), (15, "on_time"), (16, "delayed"), (1301, "delayed")]
)
def test_a_flight_is_delayed_beyond_fifteen_minutes(delay: int, batcher: str) -> None:
    assert handle_flight(dep_delay=delay).batcher == batcher


def test_flights_of_one_airport_share_batches() -> None:
    assert handle_flight(origin="LGA").batch_key == "LGA"


def test_spark_gets_the_columns_of_the_schema_alone() -> None:
    assert set(handle_flight().data) == set(FLIGHT)


def test_a_flight_that_departed_and_never_arrived_is_a_flight() -> None:
    message = handle_flight(arr_time=None, arr_delay=None, air_time=None)

    assert message.ok
    assert message.data["arr_delay"] is None


def test_a_flight_that_never_departed_is_dead_lettered_at_its_first_attempt() -> None:
    # Given a flight without a departure delay
    body = json.dumps(flight(dep_time=None, dep_delay=None)).encode()

    # When it is handled
    result, sink = handle(body)

    # Then it fails, and no retry is in store for it
    assert result.successful == []
    [judged] = sink.failed
    assert judged[0].attempt == 1
    assert judged[1].action is Action.DEAD_LETTER
    assert judged[1].reason == "never departed"


def test_what_cannot_be_read_is_retried_and_spares_its_neighbours() -> None:
    # Given a message cut short between two good ones
    good = json.dumps(flight()).encode()

    # When all are handled
    result, sink = handle(good, good[:40], good)

    # Then only that one fails; unlike a cancelled flight, it may have better luck
    assert [message.message_id for message in result.successful] == ["0", "2"]
    [judged] = sink.failed
    assert judged[0].message_id == "1"
    assert judged[1].action is Action.RETRY
    assert "JSONDecodeError" in judged[1].reason
