"""kill -9 of whoever receives or settles at Pub/Sub, at random instants: nothing is lost."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from base64 import b64decode
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from airflow_broadway.core.custody.verdicts import Action
from scripts.airflow_env import ROOT
from tests.faults.pubsub_worker import verdict_on
from tests.pubsub_server import PubSubServer, StubServer

pytestmark = [pytest.mark.faults, pytest.mark.broker, pytest.mark.slow]

LEASE = 15.0
KILLS = 24
MESSAGES = 3_000
#: Messages of one ordering key.
KEY = 30


class Handled(NamedTuple):
    """One message of one execution that came to publish what it had done."""

    number: int
    attempt: int
    redelivered: bool

    @property
    def final(self) -> bool:
        """Whether its verdict ends it."""
        return verdict_on(self.number, self.attempt).action is not Action.RETRY


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


def spawn(folder: Path, place: Place) -> subprocess.Popen[bytes]:
    """A worker, once it is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / f"worker-{time.time_ns()}.log"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.faults.pubsub_worker", str(folder)),
                *(place.server.host, place.subscription, place.topic_of_dead),
                *(str(LEASE), "400", "keyed" if place.keyed else "plain"),
            ],
            stdout=log,
            stderr=log,
            cwd=ROOT,
        )
    while not said.stat().st_size and process.poll() is None:
        time.sleep(0.01)
    return process


def kill_now_and_then(folder: Path, place: Place, *, seed: int) -> int:
    """Kill workers at random instants, then let one finish; how many were killed."""
    dice, killed = random.Random(seed), 0
    for _ in range(KILLS):
        worker = spawn(folder, place)
        try:
            worker.wait(timeout=dice.uniform(0.05, 1.5))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
            killed += 1
    assert spawn(folder, place).wait(timeout=300) == 0
    return killed


def executions(folder: Path) -> list[list[Handled]]:
    """What each execution has published, in the order of publishing."""
    manifests = sorted(folder.glob("runs/*/manifest.json"), key=lambda path: path.stat().st_mtime)
    return [
        [
            Handled(int(b64decode(payload)), attempt, redelivered)
            for _, attempt, redelivered, payload, *_ in json.loads(path.read_text())["messages"]
        ]
        for path in manifests
    ]


def check(folder: Path, place: Place) -> None:
    """Nothing is lost; what was handled again at the same attempt says so."""
    marks: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for each in (each for execution in executions(folder) for each in execution):
        marks[each.number, each.attempt].append(each.redelivered)
    done = {number for number, attempt in marks if Handled(number, attempt, False).final}
    assert done == set(range(MESSAGES))
    assert [key for key, marked in marks.items() if marked.count(False) > 1] == []
    # A kill uses up no attempt.
    assert {number for number, attempt in marks if attempt > (2 if number % 3 == 0 else 1)} == set()
    letters = {
        each.attributes["broadway_message_id"]: int(each.data)
        for each in place.server.drain(place.dead)
    }
    dead = [n for n in range(MESSAGES) if verdict_on(n, 2).action is Action.DEAD_LETTER]
    assert sorted(letters.values()) == dead
    assert place.server.pull(place.subscription) == []


@pytest.mark.timeout(900)
def test_receivers_and_settlers_that_are_killed_lose_nothing(
    pubsub: PubSubServer, tmp_path: Path
) -> None:
    place = fill(pubsub, keyed=False)

    assert kill_now_and_then(tmp_path, place, seed=11) >= KILLS * 2 // 3

    check(tmp_path, place)


@pytest.mark.timeout(900)
def test_an_exactly_once_subscription_too(pubsub: PubSubServer, tmp_path: Path) -> None:
    place = fill(pubsub, keyed=False, enable_exactly_once_delivery=True)

    assert kill_now_and_then(tmp_path, place, seed=13) >= KILLS * 2 // 3

    check(tmp_path, place)


@pytest.mark.timeout(900)
def test_ordering_keys_keep_their_order_whoever_is_killed(
    pubsub_stub: StubServer, tmp_path: Path
) -> None:
    """Google's emulator has no order for what comes again, as ``test_pubsub_peers`` shows."""
    place = fill(pubsub_stub, keyed=True)

    assert kill_now_and_then(tmp_path, place, seed=12) >= KILLS * 2 // 3

    check(tmp_path, place)
    ended: dict[int, list[int]] = defaultdict(list)
    for execution in executions(tmp_path):
        for each in execution:
            seen = ended[each.number // KEY]
            # Nobody overtakes: all before it in its key were handled to their end before it
            # itself is for the last time.
            while seen and seen[-1] >= each.number:
                seen.pop()
            if each.final:
                seen.append(each.number)
    for key, seen in ended.items():
        assert seen == list(range(key * KEY, (key + 1) * KEY))
