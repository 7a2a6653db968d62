"""``dags/kafka_flights.py`` in a real Airflow, with a Kafka of its own: the demo's own truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.airflow_env import ROOT, airflow_env, home_of
from scripts.demo_report import REASON, Expected
from scripts.load_flights import flights
from scripts.load_kafka import DEAD, TOPIC, load
from scripts.local_airflow import LocalAirflow, free_port
from tests.integration.test_sqs_flights import check_output, check_report
from tests.kafka_fixtures import skip_without_apache_kafka
from tests.kafka_server import ApacheKafka

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.broker]

#: By which flights are chosen: of few, too, some never departed.
SEED = 20_130


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.parametrize("messages", [3_000, 336_776])
def test_flights_through_kafka(tmp_path: Path, messages: int) -> None:
    skip_without_apache_kafka()
    kafka = ApacheKafka.start(tmp_path)  # of this test alone: its topics' names are the demo's
    try:
        run_flights(kafka, tmp_path, messages)
    finally:
        kafka.stop()


def run_flights(kafka: ApacheKafka, folder: Path, messages: int) -> None:
    expected = Expected()
    sent = list(expected.watch(flights(messages, SEED)))
    assert expected.never_departed
    assert load(kafka.client, messages, SEED) == messages
    env = airflow_env(
        # That of the demo's tests: its database is made once.
        home=home_of(ROOT, "airflow-test-kafka"),
        port=free_port(),
        settings={"broadway.staging": f"file://{folder / 'staging'}"},
    )
    env["AIRFLOW_CONN_KAFKA_DEFAULT"] = json.dumps(kafka.connection())
    parts = ("api-server", "scheduler", "dag-processor")
    with LocalAirflow(env, folder / "logs", components=parts) as airflow:
        airflow.wait_for_dag("kafka_flights")
        run = airflow.trigger("kafka_flights", {"output": str(folder / "output")})
        state = airflow.wait_for_run("kafka_flights", run, timeout=1500)

    assert state == "success"
    check_output(folder / "output", sent, expected)
    check_topics(kafka, expected, messages)
    [report] = (folder / "staging").rglob("report.json")
    check_report(json.loads(report.read_text()), expected)


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
        assert b": ".join(each for each in (kind, text) if each).decode() == REASON
        assert json.loads(letter.value() or b"")["dep_delay"] is None
