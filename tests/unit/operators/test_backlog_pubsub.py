"""Pub/Sub's backlog, as a triggerer and a sensor see it: by Cloud Monitoring, here a stand-in."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
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
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitoring]:
    """Cloud Monitoring for all of this process, and Airflow's connection to Google."""
    monkeypatch.delenv("PUBSUB_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("AIRFLOW__BROADWAY__STAGING", f"file://{tmp_path}/staging")
    connect(monkeypatch, account("a"))
    made = Monitoring(authority=Authority.make(tmp_path, "authority"))
    with made, made.as_googles(monkeypatch):
        yield made


account = cache(service_account)  # a key takes long to make


def connect(patch: pytest.MonkeyPatch, key: dict[str, str], **extra: str) -> None:
    """Define the Airflow connection, anew."""
    about = {"keyfile_dict": key, **extra}
    connection = {"conn_type": "google_cloud_platform", "extra": about}
    patch.setenv("AIRFLOW_CONN_GOOGLE", json.dumps(connection))


def trigger(**bounds: Any) -> BroadwayBacklogTrigger:
    """As a triggerer makes it of what was stored."""
    made = BroadwayBacklogTrigger(Orders, dag_id="orders", poke_interval=1.0, **bounds)
    return BroadwayBacklogTrigger(**made.serialize()[1])


def told_in(
    trigger: BroadwayBacklogTrigger,
    before: Sequence[Callable[[], Any]],
    patch: pytest.MonkeyPatch,
) -> list[list[dict[str, Any]]]:
    """What each look tells, if so much happens before it."""
    patch.setattr("airflow_broadway.triggers.backlog.count_runs", lambda _: Runs(0, 0))
    told: list[list[dict[str, Any]]] = []
    left = list(before)

    def go_on() -> None:
        if not left:
            raise asyncio.CancelledError
        left.pop(0)()
        told.append([])

    async def sleep(seconds: float) -> None:
        assert seconds == 1.0  # a failure would be looked at later
        go_on()

    patch.setattr("airflow_broadway.triggers.backlog.asyncio.sleep", sleep)

    async def follow() -> None:
        go_on()
        async for event in trigger.run():
            told[-1].append(event.payload)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(follow())
    return told


@pytest.mark.parametrize(
    ("bounds", "below", "reached", "reason"),
    [
        ({"min_messages": 5}, (4, 9_999), (5, 400), "5 messages (min_messages=5)"),
        ({"max_age": 300.0}, (4, 299), (4, 300), "the oldest since 300 s (max_age=300)"),
        ({"max_age": 300.0}, (0, 9_999), (1, 300), "the oldest since 300 s (max_age=300)"),
    ],
    ids=["number", "age", "age of none"],
)
def test_pubsubs_backlog_is_told_once_it_has_reached_its_bounds(
    bounds: dict[str, Any],
    below: tuple[int, int],
    reached: tuple[int, int],
    reason: str,
    google: Monitoring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = [lambda: google.holds(*below), lambda: google.holds(*reached), lambda: None]

    before, then, afterwards = told_in(trigger(**bounds), looks, monkeypatch)

    assert (before, afterwards) == ([], [])
    [told] = then
    assert (told["pipeline"], told["reason"]) == ("Orders", reason)
    assert (told["ready"], told["oldest_age"]) == (reached[0], float(reached[1]))
    assert all('subscription_id = "orders"' in each.filter for each in google.asked)


def unknown(why: str, google: Monitoring, patch: pytest.MonkeyPatch) -> None:
    """From now on nobody says how full the subscription is."""
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
def test_what_pubsub_does_not_say_is_said_and_is_no_empty_subscription(
    why: str,
    google: Monitoring,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    google.holds(5, 400)
    with monkeypatch.context() as patch:

        def known_again() -> None:
            google.refuses = False
            patch.undo()
            google.holds(5, 400)

        looks = [
            lambda: None,
            lambda: unknown(why, google, patch),
            lambda: None,
            known_again,
        ]
        told = told_in(trigger(min_messages=5, max_age=300.0), looks, monkeypatch)

    # An empty one would have armed it anew
    assert [len(each) for each in told] == [1, 0, 0, 0]
    assert caplog.text.count(UNKNOWN) == 1
    assert WORDS[why] in caplog.text
    assert account("a")["private_key"] not in caplog.text


@pytest.mark.parametrize("why", WORDS)
def test_a_sensor_goes_on_waiting_for_what_pubsub_does_not_say(
    why: str,
    google: Monitoring,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    sensor = BroadwayBacklogSensor(task_id="wait", pipeline=Orders, min_messages=1)
    google.holds(1, 4)
    with monkeypatch.context() as patch:
        unknown(why, google, patch)
        found: Any = sensor.poke(task_context())
        assert (found.is_done, found.xcom_value) == (False, None)
    assert (
        "does not report the depth" in capfd.readouterr().out
    )  # an operator's own logger goes past Python's
    assert WORDS[why] in caplog.text

    google.refuses = False
    google.holds(1, 4)
    found = sensor.poke(task_context())
    assert found.is_done
    assert (found.xcom_value["ready"], found.xcom_value["oldest_age"]) == (1, 4.0)


def test_googles_key_is_looked_up_at_each_look_and_is_not_stored(
    google: Monitoring, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    told_in(BroadwayBacklogTrigger(**stored), looks, monkeypatch)

    # Then Google is asked with each in its turn
    issuers = [issuer_of(str(each["authorization"])) for each in google.metadata]
    assert issuers == [account(name)["client_email"] for name in "aabb"]
    payers = [each.get("x-goog-user-project") for each in google.metadata]
    assert payers == [None, None, "payer", "payer"]
    assert {each.name for each in google.asked} == {"projects/key-project"}


def issuer_of(header: str) -> str:
    """Who has signed a token."""
    claims = header.removeprefix("Bearer ").split(".")[1]
    said = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    return str(said["iss"])
