"""``kill -9`` of senders and receivers of the embedded queue, at seeded random times."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airflow_broadway.core.custody.protocol import Entry, Settlement
from airflow_broadway.core.custody.verdicts import ACK, Action, Verdict
from airflow_broadway.core.model.message import Message
from airflow_broadway.producers.sqlite import SqliteQueue

pytestmark = pytest.mark.faults

_SENDER = """
import sys
from airflow_broadway.producers.sqlite import SqliteQueue
queue = SqliteQueue(sys.argv[1], "q")
for portion in range(1_000_000):
    queue.send([f"{portion}:{number}" for number in range(200)])
    print(portion, flush=True)
"""

# Repeatedly receives messages and settles them by their numbers.
_WORKER = """
import sys, time, uuid
from tests.faults.test_sqlite_kills import run_once
from airflow_broadway.producers.sqlite import SqliteQueue
queue = SqliteQueue(sys.argv[1], "q")
print("ready", flush=True)
while True:
    run_once(queue, uuid.uuid4().hex) or time.sleep(0.05)
"""

DEAD = Verdict(Action.DEAD_LETTER, 0.0, "dead by its number", "process")
RETRY = Verdict(Action.RETRY, 0.0, "retry", "process")
LEASE = 1.0


def run_once(queue: SqliteQueue, generation: str) -> int:
    """Receives up to 100 messages and settles them by their numbers; returns their count."""
    messages: list[Message] = []
    while len(messages) < 100:
        portion = queue.receive(generation, 20, seconds=LEASE)
        if not portion:
            break
        messages += portion
    if not messages:
        return 0
    time.sleep(0.005)  # the work
    entries = []
    for message in messages:
        number = int(message.data)
        if number % 5 == 0 and message.attempt < 3:
            entries.append(Entry(message.message_id, "", RETRY))
        elif number % 7 == 0:
            entries.append(Entry(message.message_id, "", DEAD))
    report = queue.settle(
        generation, Settlement(rest=ACK, entries=lambda: iter(entries), expected=len(messages))
    )
    assert report.total == len(messages)
    return len(messages)


def _start(program: str, path: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path)], env=env, text=True, stdout=subprocess.PIPE
    )


def _start_worker(path: Path) -> subprocess.Popen[str]:
    """Starts a worker and waits until it is ready."""
    worker = _start(_WORKER, path)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    return worker


def _kill(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    return output


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_sender_loses_no_confirmed_message(tmp_path, seed):
    path = tmp_path / "q.db"
    sender = _start(_SENDER, path)
    assert sender.stdout is not None
    first = sender.stdout.readline()
    time.sleep(random.Random(seed).uniform(0.0, 0.4))
    confirmed = [int(line) for line in (first + _kill(sender)).split()]

    with SqliteQueue(path, "q") as queue:
        counts: dict[int, int] = {}
        while messages := queue.receive("g", 5_000):
            for message in messages:
                portion = int(message.data.partition(b":")[0])
                counts[portion] = counts.get(portion, 0) + 1

    # Each call is atomic; at most one call was committed but not confirmed.
    assert set(counts.values()) == {200}
    assert set(confirmed) <= set(counts)
    assert len(counts) - len(confirmed) <= 1


def test_killed_workers_lose_and_repeat_nothing(tmp_path):
    count, kills = 10_000, 10
    path = tmp_path / "q.db"
    rng = random.Random(7)
    with SqliteQueue(path, "q") as queue:
        keys = queue.send([str(number) for number in range(count)])
        workers = [_start_worker(path), _start_worker(path)]
        for kill in range(kills):
            time.sleep(rng.uniform(0.0, 0.2))
            victim = kill % 2
            _kill(workers[victim])
            if kill < kills - 2:
                workers[victim] = _start_worker(path)
        # A run finishes the rest once the leases of the killed workers have expired.
        limit = time.monotonic() + 60
        while (depth := queue.depth()).ready + depth.delayed + depth.leased:
            assert time.monotonic() < limit
            if not run_once(queue, f"finish {time.monotonic()}"):
                time.sleep(0.2)

        letters = queue.dead_letters(limit=None)
        ended = queue.leases(ended=True)

    assert depth.dead == len(letters)
    # Every message is settled exactly once: dead-lettered by its number, or acknowledged.
    expected = {keys[number] for number in range(count) if number % 7 == 0}
    assert {letter.message_id for letter in letters} == expected
    assert len(letters) == len(expected)
    acked = sum(record.report.acked for record in ended if record.report)
    assert acked == count - len(expected)
    for record in ended:
        assert record.report is not None
        assert record.report.total == record.received
        assert record.held == 0
    assert any(record.state == "lapsed" for record in ended), "no kill hit a busy worker"
    # A kill uses up no attempt: retried messages have three attempts, others one.
    assert {letter.attempt for letter in letters if int(letter.body) % 5 == 0} == {3}
    assert {letter.attempt for letter in letters if int(letter.body) % 5} == {1}
