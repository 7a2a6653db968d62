"""The demo's pipeline: where each flight goes, and why some go nowhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_broadway.core.custody.acknowledger import Judged, RunAcknowledger
from airflow_broadway.core.custody.protocol import Delivery
from airflow_broadway.core.custody.verdicts import Action, Verdict
from airflow_broadway.core.model.acks import AckRef
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.stages.processor import ProcessorStage
from airflow_broadway.testing import test_batch, test_message
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


def body(**changes: Any) -> bytes:
    return json.dumps(flight(**changes)).encode()


@pytest.mark.parametrize(
    ("delay", "batcher"), [(-20, "on_time"), (15, "on_time"), (16, "delayed"), (1301, "delayed")]
)
def test_a_flight_is_delayed_beyond_fifteen_minutes(delay: int, batcher: str) -> None:
    [batch] = test_message(Flights, body(dep_delay=delay)).batches

    assert batch.batcher == batcher


def test_flights_of_one_airport_share_batches() -> None:
    tested = test_batch(Flights, [body(origin=origin) for origin in ("EWR", "LGA", "EWR")])

    assert {batch.info.batch_key: batch.info.size for batch in tested.batches} == {
        "EWR": 2,
        "LGA": 1,
    }


def test_spark_gets_the_columns_of_the_schema_alone() -> None:
    [message] = test_message(Flights, body()).successful

    assert set(message.data) == set(FLIGHT)


def test_a_flight_that_departed_and_never_arrived_is_a_flight() -> None:
    tested = test_message(Flights, body(arr_time=None, arr_delay=None, air_time=None))

    [message] = tested.successful
    assert message.data["arr_delay"] is None


def test_a_flight_that_never_departed_reaches_no_batch() -> None:
    tested = test_message(Flights, body(dep_time=None, dep_delay=None))

    [message] = tested.failed
    assert message.status.text == "never departed"
    assert tested.batches == []


def test_a_message_that_cannot_be_read_spares_its_neighbours() -> None:
    tested = test_batch(Flights, [body(), body()[:40], body()])

    [message] = tested.failed
    assert "JSONDecodeError" in message.status.text
    assert len(tested.successful) == 2


def verdict(data: bytes) -> Verdict:
    """Returns the producer's verdict on a message that fails at its first attempt."""
    pipeline, sink = Flights(), Sink()
    ack = AckRef(RunAcknowledger(pipeline.producer, sink), "generation", Delivery())
    ProcessorStage(pipeline).handle([Message(data, message_id="1", acknowledger=ack)])
    [(_, decided)] = sink.failed
    return decided


def test_a_flight_that_never_departed_is_not_tried_again() -> None:
    decided = verdict(body(dep_time=None, dep_delay=None))

    assert decided.action is Action.DEAD_LETTER
    assert decided.reason == "never departed"


def test_a_message_that_cannot_be_read_is_tried_again() -> None:
    # It may have been written by a sender that has been mended meanwhile, or read by a bug of ours.
    assert verdict(b"{").action is Action.RETRY
