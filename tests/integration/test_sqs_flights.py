"""``dags/sqs_flights.py`` in a real Airflow, with moto's SQS, checked against the flights sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.demo_report import REASON, Expected
from scripts.load_sqs import DEAD, QUEUE, load
from tests.integration.flights_run import SEED, FlightsRun
from tests.sqs_fixtures import wanted_sqs
from tests.sqs_server import SqsServer

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.broker]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_month_of_flights_through_sqs(tmp_path):
    server, messages = wanted_sqs(), 27_000
    flights = FlightsRun("sqs", tmp_path, messages)
    purge(server)
    assert load(server.client(max_pool_connections=8), messages, SEED) == messages

    flights.run({"AIRFLOW_CONN_AWS_DEFAULT": json.dumps(server.connection())})

    check_queues(server, flights.expected)


def purge(server: SqsServer) -> None:
    """Purges the queues, so that no message of an earlier test is left."""
    client = server.client()
    for url in client.list_queues(QueueNamePrefix=QUEUE).get("QueueUrls", []):
        client.purge_queue(QueueUrl=url)


def check_queues(server: SqsServer, expected: Expected) -> None:
    client = server.client()
    assert server.depth(client.get_queue_url(QueueName=QUEUE)["QueueUrl"]) == (0, 0, 0)
    dead_letters = read_dead_letters(server)
    assert len(dead_letters) == expected.never_departed
    reasons = [dead_letter["MessageAttributes"]["broadway_reason"] for dead_letter in dead_letters]
    assert {reason["StringValue"] for reason in reasons} == {REASON}
    assert all(json.loads(dead_letter["Body"])["dep_delay"] is None for dead_letter in dead_letters)


def read_dead_letters(server: SqsServer) -> list[Any]:
    """Returns all dead letters, read with boto3 only."""
    client, dead_letters = server.client(), []
    url = client.get_queue_url(QueueName=DEAD)["QueueUrl"]
    while received := client.receive_message(
        QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], VisibilityTimeout=600
    ).get("Messages"):
        dead_letters += received
    return dead_letters
