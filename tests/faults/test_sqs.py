"""kill -9 of whoever receives or settles at SQS, at random instants: nothing lost, order kept."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from base64 import b64decode
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from airflow_broadway.core.custody.verdicts import Action
from scripts.airflow_env import ROOT
from tests.faults.sqs_worker import verdict_on
from tests.sqs_fixtures import wanted_sqs
from tests.sqs_server import KEY, SqsServer

pytestmark = [pytest.mark.faults, pytest.mark.broker, pytest.mark.slow]

LEASE = 20.0
KILLS = 15
MESSAGES = 600
#: Messages of one group of a FIFO queue, which are sent together: so a receive brings several.
GROUP = 15


class Handled(NamedTuple):
    """One message of one execution that came to publish what it had done."""

    number: int
    attempt: int
    redelivered: bool

    @property
    def final(self) -> bool:
        """Whether its verdict ends it."""
        return verdict_on(self.number, self.attempt).action is not Action.RETRY


def fill(server: SqsServer, *, fifo: bool) -> str:
    """A queue of numbers, in groups if it is a FIFO queue; its name."""
    suffix, attributes = (".fifo", {"FifoQueue": "true"}) if fifo else ("", {})
    name = f"faults-{uuid.uuid4().hex[:12]}{suffix}"
    server.queue(f"dead-{name}", **attributes)
    url, client = server.queue(name, **attributes), server.client()
    for start in range(0, MESSAGES, 10):
        entries: list[Any] = [
            {"Id": str(number), "MessageBody": str(number)}
            | (
                {"MessageGroupId": str(number // GROUP), "MessageDeduplicationId": str(number)}
                if fifo
                else {}
            )
            for number in range(start, start + 10)
        ]
        assert not client.send_message_batch(QueueUrl=url, Entries=entries).get("Failed")
    return name


def spawn(folder: Path, server: SqsServer, queue: str) -> subprocess.Popen[bytes]:
    """A worker, once it is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / f"worker-{time.time_ns()}.log"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.faults.sqs_worker"),
                *(str(folder), server.url, queue, str(LEASE), "150"),
            ],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, **{name.upper(): value for name, value in KEY.items()}},
        )
    while not said.stat().st_size and process.poll() is None:
        time.sleep(0.01)
    return process


def kill_now_and_then(folder: Path, server: SqsServer, queue: str, *, seed: int) -> int:
    """Kill workers at random instants, then let one finish; how many were killed."""
    dice, killed = random.Random(seed), 0
    for _ in range(KILLS):
        worker = spawn(folder, server, queue)
        try:
            worker.wait(timeout=dice.uniform(0.1, 5.0))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
            killed += 1
    assert spawn(folder, server, queue).wait(timeout=300) == 0
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


def dead_letters(server: SqsServer, queue: str) -> list[int]:
    """The numbers in the dead-letter queue, by boto3 alone; each id once."""
    client, found = server.client(), {}
    url = client.get_queue_url(QueueName=f"dead-{queue}")["QueueUrl"]
    while messages := client.receive_message(
        QueueUrl=url,
        MaxNumberOfMessages=10,
        MessageAttributeNames=["All"],
        VisibilityTimeout=0 if queue.endswith(".fifo") else 600,
    ).get("Messages"):
        for message in messages:
            found[message["MessageAttributes"]["broadway_message_id"]["StringValue"]] = int(
                message["Body"]
            )
            client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    return sorted(found.values())


def check(folder: Path, server: SqsServer, queue: str) -> None:
    """Nothing is lost; what was handled again at the same attempt says so."""
    url = server.client().get_queue_url(QueueName=queue)["QueueUrl"]
    assert server.depth(url) == (0, 0, 0)
    marks: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for each in (each for execution in executions(folder) for each in execution):
        marks[each.number, each.attempt].append(each.redelivered)
    done = {number for number, attempt in marks if Handled(number, attempt, False).final}
    assert done == set(range(MESSAGES))
    assert [key for key, marked in marks.items() if marked.count(False) > 1] == []
    # A kill uses up no attempt.
    assert {number for number, attempt in marks if attempt > (2 if number % 3 == 0 else 1)} == set()
    dead = [n for n in range(MESSAGES) if verdict_on(n, 2).action is Action.DEAD_LETTER]
    assert dead_letters(server, queue) == dead


@pytest.mark.timeout(900)
def test_a_standard_queue_whose_receivers_and_settlers_are_killed(tmp_path: Path) -> None:
    server = wanted_sqs()
    queue = fill(server, fifo=False)

    assert kill_now_and_then(tmp_path, server, queue, seed=11) >= KILLS // 2

    check(tmp_path, server, queue)


@pytest.mark.timeout(900)
def test_a_fifo_queue_keeps_its_order_whoever_is_killed(tmp_path: Path) -> None:
    server = wanted_sqs()
    queue = fill(server, fifo=True)

    assert kill_now_and_then(tmp_path, server, queue, seed=12) >= KILLS // 2

    check(tmp_path, server, queue)
    ended: dict[int, list[int]] = defaultdict(list)
    for execution in executions(tmp_path):
        for each in execution:
            seen = ended[each.number // GROUP]
            # Nobody overtakes: all before it in its group were handled to their end before it
            # itself is for the last time.
            while seen and seen[-1] >= each.number:
                seen.pop()
            if each.final:
                seen.append(each.number)
    for group, seen in ended.items():
        assert seen == list(range(group * GROUP, (group + 1) * GROUP))
