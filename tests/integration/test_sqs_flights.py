"""``dags/sqs_flights.py`` in a real Airflow, with moto's SQS over HTTP: the demo's own truth."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from scripts.airflow_env import ROOT, airflow_env, home_of
from scripts.demo_report import CLASSES, REASON, Expected
from scripts.load_flights import flights
from scripts.load_sqs import DEAD, QUEUE, load
from scripts.local_airflow import LocalAirflow, free_port
from tests.sqs_fixtures import wanted_sqs
from tests.sqs_server import SqsServer

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.broker]

#: By which flights are chosen: of few, too, some never departed.
SEED = 20_130


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_month_of_flights_through_sqs(tmp_path: Path) -> None:
    server, messages = wanted_sqs(), 27_000
    expected = Expected()
    sent = list(expected.watch(flights(messages, SEED)))
    assert expected.never_departed
    purge(server)
    assert load(server.client(max_pool_connections=8), messages, SEED) == messages
    env = airflow_env(
        # That of the demo's tests: its database is made once.
        home=home_of(ROOT, "airflow-test-sqs"),
        port=free_port(),
        settings={"broadway.staging": f"file://{tmp_path / 'staging'}"},
    )
    env["AIRFLOW_CONN_AWS_DEFAULT"] = json.dumps(server.connection())
    parts = ("api-server", "scheduler", "dag-processor")
    with LocalAirflow(env, tmp_path / "logs", components=parts) as airflow:
        airflow.wait_for_dag("sqs_flights")
        run = airflow.trigger("sqs_flights", {"output": str(tmp_path / "output")})
        state = airflow.wait_for_run("sqs_flights", run, timeout=1500)

    assert state == "success"
    check_output(tmp_path / "output", sent, expected)
    check_queues(server, expected)
    [report] = (tmp_path / "staging").rglob("report.json")
    check_report(json.loads(report.read_text()), expected)


def purge(server: SqsServer) -> None:
    """Leave nothing of a test before."""
    client = server.client()
    for url in client.list_queues(QueueNamePrefix=QUEUE).get("QueueUrls", []):
        client.purge_queue(QueueUrl=url)


def check_output(folder: Path, sent: list[Any], expected: Expected) -> None:
    found = ds.dataset(folder / "flights", format="parquet", partitioning="hive")
    rows = found.to_table(columns=["message_id", "batcher", "origin", "dep_delay", "flight"])
    departed = [flight for flight in sent if flight["dep_delay"] is not None]
    assert pc.count_distinct(rows["message_id"]).as_py() == rows.num_rows == len(departed)
    placed = zip(rows["batcher"].to_pylist(), rows["origin"].to_pylist(), strict=True)
    assert Counter(placed) == expected.rows
    told = zip(rows["flight"].to_pylist(), rows["dep_delay"].to_pylist(), strict=True)
    assert Counter(told) == Counter(
        (f"{flight['carrier']}{flight['flight']}", flight["dep_delay"]) for flight in departed
    )
    hours = ds.dataset(folder / "hours", format="parquet", partitioning="hive").to_table()
    assert pc.sum(hours["flights"]).as_py() == len(departed)
    assert pc.sum(hours["minutes"]).as_py() == sum(flight["dep_delay"] for flight in departed)


def check_queues(server: SqsServer, expected: Expected) -> None:
    client = server.client()
    assert server.depth(client.get_queue_url(QueueName=QUEUE)["QueueUrl"]) == (0, 0, 0)
    letters = dead_letters(server)
    assert len(letters) == expected.never_departed
    reasons = [letter["MessageAttributes"]["broadway_reason"] for letter in letters]
    assert {reason["StringValue"] for reason in reasons} == {REASON}
    assert all(json.loads(letter["Body"])["dep_delay"] is None for letter in letters)


def dead_letters(server: SqsServer) -> list[Any]:
    """All of them, read with boto3 alone."""
    client, letters = server.client(), []
    url = client.get_queue_url(QueueName=DEAD)["QueueUrl"]
    while found := client.receive_message(
        QueueUrl=url,
        MaxNumberOfMessages=10,
        MessageAttributeNames=["All"],
        VisibilityTimeout=600,
    ).get("Messages"):
        letters += found
    return letters


def check_report(report: dict[str, Any], expected: Expected) -> None:
    totals = report["totals"]
    assert report["balanced"]
    assert totals["received"] == expected.sent
    assert {name: totals[name] for name in CLASSES} == {
        **dict.fromkeys(CLASSES, 0),
        "acked": expected.sent - expected.never_departed,
        "dead_lettered": expected.never_departed,
    }
