"""``dags/pubsub_flights.py`` in a real Airflow, at Google's emulator: the demo's own truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.airflow_env import ROOT, airflow_env, home_of
from scripts.demo_report import REASON, Expected
from scripts.load_flights import flights
from scripts.load_pubsub import DEAD, NAME, load
from scripts.local_airflow import LocalAirflow, free_port
from tests.integration.test_sqs_flights import check_output, check_report
from tests.pubsub_server import PROJECT, PubSubServer

pytestmark = [pytest.mark.airflow, pytest.mark.spark, pytest.mark.broker]

#: By which flights are chosen: of few, too, some never departed.
SEED = 20_130


@pytest.mark.timeout(1800)
@pytest.mark.slow
@pytest.mark.parametrize("messages", [3_000, 336_776])
def test_flights_through_pubsub(pubsub: PubSubServer, tmp_path: Path, messages: int) -> None:
    purge(pubsub)
    expected = Expected()
    sent = list(expected.watch(flights(messages, SEED)))
    assert expected.never_departed
    assert load(pubsub.publisher, pubsub.subscriber, PROJECT, messages, SEED) == messages
    env = airflow_env(
        # That of the demo's tests: its database is made once.
        home=home_of(ROOT, "airflow-test-pubsub"),
        port=free_port(),
        settings={"broadway.staging": f"file://{tmp_path / 'staging'}"},
    )
    known = {"conn_type": "google_cloud_platform", "extra": {"project": PROJECT}}
    env["AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT"] = json.dumps(known)
    env["PUBSUB_EMULATOR_HOST"] = pubsub.host
    parts = ("api-server", "scheduler", "dag-processor")
    with LocalAirflow(env, tmp_path / "logs", components=parts) as airflow:
        airflow.wait_for_dag("pubsub_flights")
        # A busy machine's emulator is slow: a run's own bound would leave it with some of them.
        given = {"output": str(tmp_path / "output"), "max_seconds": 1200}
        run = airflow.trigger("pubsub_flights", given)
        state = airflow.wait_for_run("pubsub_flights", run, timeout=1500)

    assert state == "success"
    check_output(tmp_path / "output", sent, expected)
    check_subscriptions(pubsub, expected)
    [report] = (tmp_path / "staging").rglob("report.json")
    check_report(json.loads(report.read_text()), expected)


def purge(server: PubSubServer) -> None:
    """Leave nothing of a test before."""
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
