"""Pub/Sub's backlog, as a triggerer and a sensor see it: by Cloud Monitoring, here a stand-in."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from airflow_broadway import Broadway, Message
from airflow_broadway.producers.pubsub import PubSubProducer
from airflow_broadway.runs.backlog.crossings import Runs
from airflow_broadway.sensors.backlog import BroadwayBacklogSensor
from airflow_broadway.triggers.backlog import BroadwayBacklogTrigger
from tests.pubsub_stub.monitoring import Monitoring
from tests.tls import Authority
from tests.unit.operators.context import task_context
from tests.unit.producers.pubsub.kit import service_account

UNKNOWN = "does not say how full the queue is"


class Orders(Broadway):
    producer = PubSubProducer(subscription="orders", project_id="key-project", conn_id="google")

    def handle_message(self, processor: str, message: Message, context: Any) -> Message:
        return message


@pytest.fixture
def google(tmp_path, monkeypatch):
    """Cloud Monitoring for all of this process, and Airflow's connection to Google."""
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    connect(monkeypatch, account("a"))
    monitoring = Monitoring(authority=Authority.make(tmp_path, "authority"))
    with monitoring, monitoring.as_googles(monkeypatch):
        yield monitoring


account = cache(service_account)  # a key takes long to make


def connect(patch: pytest.MonkeyPatch, key: dict[str, str], **extra: str) -> None:
    """Define the Airflow connection, anew."""
    fields = {"keyfile_dict": key, **extra}
    connection = {"conn_type": "google_cloud_platform", "extra": fields}
    patch.setenv("AIRFLOW_CONN_GOOGLE", json.dumps(connection))


def trigger(**bounds: Any) -> BroadwayBacklogTrigger:
    """A trigger as stored and loaded by a triggerer."""
    new = BroadwayBacklogTrigger(Orders, dag_id="orders", poke_interval=1.0, **bounds)
    return BroadwayBacklogTrigger(**new.serialize()[1])


def events_of(
    trigger: BroadwayBacklogTrigger, before: Sequence[Callable[[], Any]], patch: pytest.MonkeyPatch
) -> list[list[dict[str, Any]]]:
    """The events of all looks, each after a step."""
    patch.setattr("airflow_broadway.triggers.backlog.count_runs", lambda _: Runs(0, 0))
    events: list[list[dict[str, Any]]] = []
    steps = list(before)

    def go_on() -> None:
        if not steps:
            raise asyncio.CancelledError
        steps.pop(0)()
        events.append([])

    async def sleep(seconds: float) -> None:
        assert seconds == 1.0  # a failure would be looked at later
        go_on()

    patch.setattr("airflow_broadway.triggers.backlog.asyncio.sleep", sleep)

    async def follow() -> None:
        go_on()
        async for event in trigger.run():
            events[-1].append(event.payload)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follow())
    return events


@pytest.mark.parametrize(
    ("bounds", "below", "reached", "reason"),
    [
        ({"min_messages": 5}, (4, 9_999), (5, 400), "5 messages (min_messages=5)"),
        ({"max_age": 300.0}, (4, 299), (4, 300), "the oldest since 300 s (max_age=300)"),
        ({"max_age": 300.0}, (0, 9_999), (1, 300), "the oldest since 300 s (max_age=300)"),
    ],
    ids=["number", "age", "age of none"],
)
def test_pubsub_backlog_is_reported_when_it_reaches_its_bounds(
    bounds, below, reached, reason, google, monkeypatch
):
    looks = [lambda: google.holds(*below), lambda: google.holds(*reached), lambda: None]

    before, then, afterwards = events_of(trigger(**bounds), looks, monkeypatch)

    assert (before, afterwards) == ([], [])
    [event] = then
    assert (event["pipeline"], event["reason"]) == ("Orders", reason)
    assert (event["ready"], event["oldest_age"]) == (reached[0], float(reached[1]))
    assert all('subscription_id = "orders"' in request.filter for request in google.requests)


def unknown(why: str, google: Monitoring, patch: pytest.MonkeyPatch) -> None:
    """Makes the depth of the subscription unknown."""
    google.refuses = why == "denied"
    if why == "not installed":
        patch.setitem(sys.modules, "google.cloud.monitoring_v3", None)
    if why == "no value":
        google.values = {}
    if why == "emulator":
        patch.setenv("PUBSUB_EMULATOR_HOST", "127.0.0.1:1")


WORDS = {
    "denied": "allow monitoring.timeSeries.list on this project",
    "not installed": "monitoring_v3 is not installed: install airflow-broadway[pubsub]",
    "no value": "Cloud Monitoring has no new value",
    "emulator": "an emulator has no Cloud Monitoring",
}


@pytest.mark.parametrize("why", WORDS)
def test_unknown_pubsub_depth_is_logged_and_not_zero(why, google, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    google.holds(5, 400)
    with monkeypatch.context() as patch:

        def known_again():
            google.refuses = False
            patch.undo()
            google.holds(5, 400)

        looks = [lambda: None, lambda: unknown(why, google, patch), lambda: None, known_again]
        events = events_of(trigger(min_messages=5, max_age=300.0), looks, monkeypatch)

    # An empty one would have rearmed it
    assert [len(payloads) for payloads in events] == [1, 0, 0, 0]
    assert caplog.text.count(UNKNOWN) == 1
    assert WORDS[why] in caplog.text
    assert account("a")["private_key"] not in caplog.text


@pytest.mark.parametrize("why", WORDS)
def test_sensor_keeps_waiting_on_an_unknown_pubsub_depth(why, google, monkeypatch, caplog, capfd):
    caplog.set_level(logging.INFO)
    sensor = BroadwayBacklogSensor(task_id="wait", pipeline=Orders, min_messages=1)
    google.holds(1, 4)
    with monkeypatch.context() as patch:
        unknown(why, google, patch)
        result: Any = sensor.poke(task_context())
        assert (result.is_done, result.xcom_value) == (False, None)
    # An operator's own logger bypasses Python's
    assert "does not report the depth" in capfd.readouterr().out
    assert WORDS[why] in caplog.text

    google.refuses = False
    google.holds(1, 4)
    result = sensor.poke(task_context())
    assert result.is_done
    assert (result.xcom_value["ready"], result.xcom_value["oldest_age"]) == (1, 4.0)


def test_google_key_is_read_at_each_look_and_not_stored(google, monkeypatch):
    # Given a trigger that was stored where there is no connection, as where a Dag is parsed
    monkeypatch.delenv("AIRFLOW_CONN_GOOGLE")
    path, stored = trigger(min_messages=5).serialize()
    assert "google" in stored["queues"]
    assert json.loads(stored["queues"])["lag"] == 240.0
    assert "PRIVATE" not in json.dumps([path, stored])

    # When the key is another one at the second look
    google.holds(1, 1)
    looks = [
        lambda: connect(monkeypatch, account("a")),
        lambda: connect(monkeypatch, account("b"), quota_project_id="payer"),
    ]
    events_of(BroadwayBacklogTrigger(**stored), looks, monkeypatch)

    # Then requests to Google have both in turn
    issuers = [issuer_of(str(fields["authorization"])) for fields in google.metadata]
    assert issuers == [account(name)["client_email"] for name in "aabb"]
    payers = [fields.get("x-goog-user-project") for fields in google.metadata]
    assert payers == [None, None, "payer", "payer"]
    assert {request.name for request in google.requests} == {"projects/key-project"}


def issuer_of(header: str) -> str:
    """The issuer of a token."""
    claims = header.removeprefix("Bearer ").split(".")[1]
    payload = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    return str(payload["iss"])
