"""The flights that left New York City in 2013, as messages of an SQS queue.

``python -m scripts.load_sqs --endpoint-url http://127.0.0.1:5000 --messages 1000`` sends the first
1,000 to the queue ``flights``; without ``--messages`` it sends all.  Creates the queue, with a
redrive policy to ``flights-dead``, if it does not exist.  The default endpoint is AWS: 33,678
requests, about $0.02.  boto3 finds the credentials (``AWS_PROFILE``, …).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

from scripts.load_flights import add_arguments, flights

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

QUEUE = "flights"
DEAD = "flights-dead"

#: Messages and bytes per request: SQS's limits.
BATCH = 10
#: Requests in flight.
THREADS = 8
#: Requests handed to the threads at a time.
CHUNK = 1_000


def load(client: SQSClient, messages: int | None = None, seed: int | None = None) -> int:
    """Sends flights; returns the number of confirmed messages.

    :raises RuntimeError: If SQS rejects messages.
    """
    url = make_queue(client)
    count = 0
    with ThreadPoolExecutor(THREADS) as pool:
        requests = _requests(messages, seed)
        while chunk := list(islice(requests, CHUNK)):
            for sent in pool.map(lambda entries: _send(client, url, entries), chunk):
                count += sent
    return count


def make_queue(client: SQSClient) -> str:
    """Creates the queue and its dead-letter queue if necessary; returns the queue's URL."""
    dead = client.create_queue(QueueName=DEAD)["QueueUrl"]
    attributes = client.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])
    # Releases and expired leases count as receives, too: see docs/sqs.md.
    policy = {"deadLetterTargetArn": attributes["Attributes"]["QueueArn"], "maxReceiveCount": 10}
    url: str = client.create_queue(
        QueueName=QUEUE, Attributes={"RedrivePolicy": json.dumps(policy)}
    )["QueueUrl"]
    return url


def _requests(messages: int | None, seed: int | None) -> Iterator[Sequence[Mapping[str, str]]]:
    rows = flights(messages, seed)
    while chunk := list(islice(rows, BATCH)):
        yield [
            {"Id": str(number), "MessageBody": json.dumps(flight, separators=(",", ":"))}
            for number, flight in enumerate(chunk)
        ]


def _send(client: SQSClient, url: str, entries: Sequence[Any]) -> int:
    failed = client.send_message_batch(QueueUrl=url, Entries=entries).get("Failed") or []
    if failed:
        why = failed[0]
        raise RuntimeError(
            f"{len(failed)} messages were refused: {why['Code']}: {why.get('Message', '')}"
        )
    return len(entries)


def main() -> int:
    """Sends the flights that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint-url", help="the endpoint; default: AWS")
    parser.add_argument("--region", default="us-east-1")
    add_arguments(parser)
    args = parser.parse_args()

    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = boto3.session.Session().client(
            "sqs",
            region_name=args.region,
            endpoint_url=args.endpoint_url,
            config=Config(max_pool_connections=THREADS),
        )
        count = load(client, args.messages, args.seed)
    except (BotoCoreError, ClientError, RuntimeError) as error:
        print(f"Not all was sent: {error}", file=sys.stderr)
        return 1
    print(f"{count:,} flights are in the queue {QUEUE!r}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
