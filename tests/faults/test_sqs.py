"""kill -9 of whoever receives or settles at SQS, at random instants: nothing lost, order kept."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.faults.receipt_kills import Workers, check_order, check_published, dead_letters_of
from tests.sqs_fixtures import wanted_sqs
from tests.sqs_server import KEY, SqsServer

pytestmark = [pytest.mark.faults, pytest.mark.broker, pytest.mark.slow]

LEASE = 20.0
KILLS = 15
MESSAGES = 600
#: Messages of one group of a FIFO queue, which are sent together: so a receive brings several.
GROUP = 15


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


def kill_workers(folder: Path, server: SqsServer, queue: str, *, seed: int) -> None:
    """Kill half of some workers at least, and let the last one finish."""
    workers = Workers(
        folder,
        "tests.faults.sqs_worker",
        [server.url, queue, str(LEASE), "150", str(MESSAGES)],
        {name.upper(): value for name, value in KEY.items()},
    )
    assert workers.kill_now_and_then(KILLS, within=(0.1, 5.0), seed=seed) >= KILLS // 2


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
    """Nothing is lost, nothing unmarked, nothing left."""
    url = server.client().get_queue_url(QueueName=queue)["QueueUrl"]
    assert server.depth(url) == (0, 0, 0)
    check_published(folder, MESSAGES)
    assert dead_letters(server, queue) == dead_letters_of(MESSAGES)


@pytest.mark.timeout(900)
def test_a_standard_queue_whose_receivers_and_settlers_are_killed(tmp_path):
    server = wanted_sqs()
    queue = fill(server, fifo=False)

    kill_workers(tmp_path, server, queue, seed=11)

    check(tmp_path, server, queue)


@pytest.mark.timeout(900)
def test_a_fifo_queue_keeps_its_order_whoever_is_killed(tmp_path):
    server = wanted_sqs()
    queue = fill(server, fifo=True)

    kill_workers(tmp_path, server, queue, seed=12)

    check(tmp_path, server, queue)
    check_order(tmp_path, MESSAGES, group=GROUP)
