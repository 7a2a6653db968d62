"""The flights that left New York City in 2013, as messages of a Pub/Sub topic.

``python -m scripts.load_pubsub --project my-project --messages 1000`` publishes the first 1,000 to
the topic ``flights``; without ``--messages`` it publishes all.  Creates the topic, the subscription
``flights``, and ``flights-dead`` for dead letters, if they do not exist.  ``PUBSUB_EMULATOR_HOST``
selects the emulator.  Google's client library finds the credentials.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

from scripts.load_flights import add_arguments, flights

#: The topic, and its subscription.
NAME = "flights"
DEAD = "flights-dead"

#: Messages per request; Pub/Sub's limit is 1,000.
BATCH = 500
#: Requests in flight.
THREADS = 4
#: Requests handed to the threads at a time.
CHUNK = 100
#: Default ack deadline of the subscriptions in seconds.
ACK_DEADLINE = 60


def load(
    publisher: Any,
    subscriber: Any,
    project: str,
    messages: int | None = None,
    seed: int | None = None,
) -> int:
    """Publishes flights; returns the number of confirmed messages.

    :param publisher: A ``google.pubsub_v1.PublisherClient``, or a compatible one.
    :raises GoogleAPICallError: If Pub/Sub rejects messages.
    """
    topic = make(publisher, subscriber, project)

    def send(batch: list[dict[str, Any]]) -> int:
        answer = publisher.publish(request={"topic": topic, "messages": batch})
        return len(answer.message_ids)

    count = 0
    with ThreadPoolExecutor(THREADS) as pool:
        batches = _batches(messages, seed)
        while chunk := list(islice(batches, CHUNK)):
            count += sum(pool.map(send, chunk))
    return count


def _batches(messages: int | None, seed: int | None) -> Iterator[list[dict[str, Any]]]:
    rows = flights(messages, seed)
    while batch := list(islice(rows, BATCH)):
        yield [{"data": json.dumps(flight, separators=(",", ":")).encode()} for flight in batch]


def make(publisher: Any, subscriber: Any, project: str) -> str:
    """Creates the topics and subscriptions if necessary; returns the topic's full name."""
    from google.api_core.exceptions import AlreadyExists

    for name in (NAME, DEAD):
        topic = f"projects/{project}/topics/{name}"
        with suppress(AlreadyExists):
            publisher.create_topic(name=topic)
        with suppress(AlreadyExists):
            subscriber.create_subscription(
                request={
                    "name": f"projects/{project}/subscriptions/{name}",
                    "topic": topic,
                    "ack_deadline_seconds": ACK_DEADLINE,
                }
            )
    return f"projects/{project}/topics/{NAME}"


def main() -> int:
    """Sends the flights that the command line selects."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project", default=os.environ.get("GOOGLE_CLOUD_PROJECT"))
    add_arguments(parser)
    args = parser.parse_args()
    if not args.project:
        parser.error("--project is needed, or GOOGLE_CLOUD_PROJECT")
    from google.pubsub_v1 import PublisherClient as Publisher

    # The low-level client, with the transport of the batching publisher: it supports the emulator.
    publisher = Publisher(transport=PublisherClient().transport)
    try:
        count = load(publisher, SubscriberClient(), args.project, args.messages, args.seed)
    except GoogleAPICallError as error:
        print(f"Not all flights were published: {error.message}", file=sys.stderr)
        return 1
    print(f"{count:,} flights are in the topic {NAME!r} of {args.project!r}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
