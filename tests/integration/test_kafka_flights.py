"""``dags/kafka_flights.py`` in a real Airflow, with Kafka, checked against the flights sent."""

from __future__ import annotations

import json

import pytest

from scripts.demo_report import REASON, Expected
from scripts.load_kafka import DEAD, TOPIC, load
from tests.integration.flights_run import SEED, FlightsRun
from tests.kafka_fixtures import skip_without_apache_kafka
from tests.kafka_server import ApacheKafka

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.broker]


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.parametrize("messages", [3_000, 336_776])
def test_flights_through_kafka(tmp_path, messages):
    skip_without_apache_kafka()
    kafka = ApacheKafka.start(tmp_path)  # of this test alone: its topics' names are the demo's
    try:
        flights = FlightsRun("kafka", tmp_path, messages)
        assert load(kafka.client, messages, SEED) == messages

        flights.run({"AIRFLOW_CONN_KAFKA_DEFAULT": json.dumps(kafka.connection())})

        check_topics(kafka, flights.expected, messages)
    finally:
        kafka.stop()


def check_topics(kafka: ApacheKafka, expected: Expected, messages: int) -> None:
    committed, ends = kafka.committed("flights", TOPIC), kafka.watermarks(TOPIC)
    assert {number: offset for number, (offset, _) in committed.items()} == {
        number: end for number, (_, end) in ends.items()
    }
    assert sum(end for _, end in ends.values()) == messages
    letters = kafka.read(DEAD)
    assert len(letters) == expected.never_departed
    for letter in letters:
        headers = dict(letter.headers() or [])
        kind = headers["__connect.errors.exception.class.name"]
        text = headers["__connect.errors.exception.message"]
        assert isinstance(kind, bytes)
        assert isinstance(text, bytes)
        assert b": ".join(part for part in (kind, text) if part).decode() == REASON
        assert json.loads(letter.value() or b"")["dep_delay"] is None
