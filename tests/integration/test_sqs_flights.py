"""``dags/sqs_flights.py`` in a real Airflow, with moto's SQS over HTTP: the demo's own truth."""

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
    """Leaves nothing of a test before."""
    client = server.client()
    for url in client.list_queues(QueueNamePrefix=QUEUE).get("QueueUrls", []):
        client.purge_queue(QueueUrl=url)


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
        QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"], VisibilityTimeout=600
    ).get("Messages"):
        letters += found
    return letters
