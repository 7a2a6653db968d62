"""kill -9 of whoever receives or settles at Pub/Sub, at random instants: nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.receipt_kills import Workers, check_order, check_published, dead_letters_of
from tests.pubsub_server import PubSubServer

pytestmark = [pytest.mark.faults, pytest.mark.broker, pytest.mark.slow]

LEASE = 15.0
KILLS = 24
MESSAGES = 3_000
#: Messages of one ordering key.
KEY = 30


class Place(NamedTuple):
    """Where workers are at work."""

    server: PubSubServer
    subscription: str
    topic_of_dead: str
    dead: str
    keyed: bool


def fill(server: PubSubServer, *, keyed: bool, **settings: Any) -> Place:
    """A subscription of numbers."""
    topic, dead = server.topic(), server.topic()
    place = Place(
        server,
        server.subscription(topic, enable_message_ordering=keyed, **settings),
        dead,
        server.subscription(dead),
        keyed,
    )
    server.publish_all(
        topic,
        [
            {"data": b"%d" % number, **({"ordering_key": str(number // KEY)} if keyed else {})}
            for number in range(MESSAGES)
        ],
    )
    return place


def kill_workers(folder: Path, place: Place, *, seed: int) -> None:
    """Kill most of some workers, and let the last one finish."""
    arguments = [place.server.host, place.subscription, place.topic_of_dead]
    arguments += [str(LEASE), "400", "keyed" if place.keyed else "plain", str(MESSAGES)]
    workers = Workers(folder, "tests.faults.pubsub_worker", arguments, {})
    assert workers.kill_now_and_then(KILLS, within=(0.05, 1.5), seed=seed) >= KILLS * 2 // 3


def check(folder: Path, place: Place) -> None:
    """Nothing is lost, nothing unmarked, nothing left."""
    server, subscription = place.server, place.subscription

    def left() -> list[int]:
        time.sleep(LEASE)  # what nobody wrote down a receipt of is hidden for so long
        return [int(each.data) for each in server.drain(subscription)]

    check_published(folder, MESSAGES, left)
    letters = {
        each.attributes["broadway_message_id"]: int(each.data) for each in server.drain(place.dead)
    }
    assert sorted(letters.values()) == dead_letters_of(MESSAGES)
    assert server.pull(subscription) == []


@pytest.mark.timeout(900)
def test_receivers_and_settlers_that_are_killed_lose_nothing(pubsub, tmp_path):
    place = fill(pubsub, keyed=False)

    kill_workers(tmp_path, place, seed=11)

    check(tmp_path, place)


@pytest.mark.timeout(900)
def test_an_exactly_once_subscription_too(pubsub, tmp_path):
    place = fill(pubsub, keyed=False, enable_exactly_once_delivery=True)

    kill_workers(tmp_path, place, seed=13)

    check(tmp_path, place)


@pytest.mark.timeout(900)
def test_ordering_keys_keep_their_order_whoever_is_killed(pubsub_stub, tmp_path):
    """Google's emulator has no order for what comes again, as ``test_pubsub_peers`` shows."""
    place = fill(pubsub_stub, keyed=True)

    kill_workers(tmp_path, place, seed=12)

    check(tmp_path, place)
    check_order(tmp_path, MESSAGES, group=KEY)
