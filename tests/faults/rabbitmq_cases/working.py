"""Processes that drain a queue (``tests.faults.rabbitmq_worker``), and what their files say."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from base64 import b64decode
from collections import defaultdict
from pathlib import Path

from airflow_broadway.core.custody.verdicts import ACK, Action
from tests.faults.found import Found
from tests.faults.rabbitmq_cases.place import Place
from tests.faults.rabbitmq_worker import verdict_on

_ROOT = Path(__file__).resolve().parents[3]


def spawn(
    place: Place, *, lease: float, most: int, uri: str | None = None, name: str = ""
) -> subprocess.Popen[bytes]:
    """A worker, once it is at work; what it says is in ``worker-*.log``.

    :param most: Messages in a run.
    :param uri: The broker's address, if it is not the server's own.
    :param name: The worker's own folder, beside those of others.
    """
    folder = place.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / f"worker-{time.time_ns()}.log"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.faults.rabbitmq_worker"),
                *(str(folder), uri or place.server.uri, place.queue, str(lease), str(most)),
            ],
            stdout=log,
            stderr=log,
            cwd=_ROOT,
        )
    while not said.stat().st_size and process.poll() is None:
        time.sleep(0.01)
    return process


def ends_well(worker: subprocess.Popen[bytes]) -> None:
    """Wait until a worker has found the queue empty; one that does not end is ended."""
    try:
        assert worker.wait(timeout=240) == 0
    finally:
        worker.kill()


def kill_now_and_then(place: Place, *, lease: float, most: int, kills: int, seed: int) -> int:
    """Kill workers at random instants, then let one finish; how many died."""
    dice = random.Random(seed)
    killed = 0
    for _ in range(kills):
        worker = spawn(place, lease=lease, most=most)
        try:
            worker.wait(timeout=dice.uniform(0.05, 1.2))
        except subprocess.TimeoutExpired:
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            killed += 1
    finish(place, lease=lease, most=most)
    return killed


def finish(place: Place, *, lease: float, most: int, name: str = "") -> None:
    """Run a worker until the queue stays empty, leases that must lapse included."""
    ends_well(spawn(place, lease=lease, most=most, name=name))


def found_by_workers(place: Place, case: str, count: int) -> Found:
    """What became of the numbers below ``count``, by the workers' files and the queues."""
    found = Found(f"rabbitmq.{case}", count)
    handled: dict[tuple[int, int], list[bool]] = defaultdict(list)
    done: set[int] = set()
    for path in place.folder.rglob("runs/*/manifest.json"):
        for _, attempt, redelivered, payload, *_ in json.loads(path.read_text())["messages"]:
            number = int(b64decode(payload))
            handled[number, attempt].append(redelivered)
            if verdict_on(number, attempt).action in (ACK.action, Action.DEAD_LETTER):
                done.add(number)
    found.lost = [number for number in range(count) if number not in done]
    for marks in handled.values():
        found.duplicates += len(marks) - 1
        found.unmarked += max(0, marks.count(False) - 1)
    place.look_for_rest(found)
    dead, wanted = place.dead_numbers(), set(range(0, count, 7))
    if dead != wanted:
        wrong = sorted(dead ^ wanted)[:10]
        found.mistakes.append(f"dead letters that are missing, or should not be: {wrong}")
    return found
