"""``dags/pubsub_flights.py`` in a real Airflow, at Google's emulator, against the flights sent."""

from __future__ import annotations

import json

import pytest

from scripts.demo_report import REASON, Expected
from scripts.load_pubsub import DEAD, NAME, load
from tests.integration.flights_run import SEED, FlightsRun
from tests.pubsub_server import PROJECT, PubSubServer

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.broker]


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.parametrize("messages", [3_000, 336_776])
def test_flights_through_pubsub(pubsub, tmp_path, messages):
    purge(pubsub)
    flights = FlightsRun("pubsub", tmp_path, messages)
    assert load(pubsub.publisher, pubsub.subscriber, PROJECT, messages, SEED) == messages

    connection = {"conn_type": "google_cloud_platform", "extra": {"project": PROJECT}}
    flights.run(
        {
            "AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT": json.dumps(connection),
            "PUBSUB_EMULATOR_HOST": pubsub.host,
        },
        # The emulator is slow on a busy machine: the default bound would leave some messages.
        max_seconds=1200,
    )

    check_subscriptions(pubsub, flights.expected)


def purge(server: PubSubServer) -> None:
    """Deletes the subscriptions of an earlier test."""
    from google.api_core.exceptions import NotFound

    for name in (NAME, DEAD):
        try:
            server.subscriber.delete_subscription(subscription=subscription(name))
        except NotFound:
            return


def subscription(name: str) -> str:
    return f"projects/{PROJECT}/subscriptions/{name}"


def check_subscriptions(server: PubSubServer, expected: Expected) -> None:
    assert server.pull(subscription(NAME)) == []
    letters = server.drain(subscription(DEAD))
    assert len(letters) == expected.never_departed
    assert {letter.attributes["broadway_reason"] for letter in letters} == {REASON}
    assert all(json.loads(letter.data)["dep_delay"] is None for letter in letters)
