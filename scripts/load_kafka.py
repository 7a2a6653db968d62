"""The flights that left New York City in 2013, as messages of a Kafka topic.

``python -m scripts.load_kafka --bootstrap 127.0.0.1:9092 --messages 1000`` sends the first 1,000 to
the topic ``flights``; without ``--messages`` it sends all.  Creates the topic, and ``flights-dlt``
for dead letters, if they do not exist.  A flight's key is its carrier.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from scripts.load_flights import add_arguments, flights

TOPIC = "flights"
DEAD, RETRY = "flights-dlt", "flights.retry"
PARTITIONS = 4


def load(settings: dict[str, Any], messages: int | None = None, seed: int | None = None) -> int:
    """Sends flights and waits for Kafka's confirmations; returns their number.

    :param settings: librdkafka's settings, such as ``bootstrap.servers``.
    :raises RuntimeError: If Kafka does not accept all messages.
    """
    from confluent_kafka import Producer

    make_topics(settings)
    producer = Producer({**settings, "enable.idempotence": True, "linger.ms": 20})
    failed: list[Any] = []

    def report(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error)

    count = 0
    for flight in flights(messages, seed):
        body = json.dumps(flight, separators=(",", ":"))
        while True:
            try:
                producer.produce(TOPIC, body, str(flight["carrier"]), on_delivery=report)
                break
            except BufferError:  # the client's buffer is full
                producer.poll(0.1)
        producer.poll(0)
        count += 1
    waiting = producer.flush(60)
    if failed or waiting:
        why = f": {failed[0].str()}" if failed else ""
        raise RuntimeError(f"{len(failed) + waiting} messages were not accepted{why}")
    return count


def make_topics(settings: dict[str, Any]) -> None:
    """Creates the topics that do not exist."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import KafkaError, NewTopic

    admin = AdminClient(settings)
    wanted = [NewTopic(TOPIC, PARTITIONS), NewTopic(RETRY, 1), NewTopic(DEAD, 1)]
    for made in admin.create_topics(wanted).values():
        try:
            made.result(timeout=30)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise RuntimeError(
                    f"the topics could not be created: {error.args[0].str()}"
                ) from error


def main() -> int:
    """Sends the flights that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", default="127.0.0.1:9092", help="host:port of a broker")
    add_arguments(parser)
    args = parser.parse_args()
    try:
        count = load({"bootstrap.servers": args.bootstrap}, args.messages, args.seed)
    except RuntimeError as error:
        print(f"Not all was sent: {error}", file=sys.stderr)
        return 1
    print(f"{count:,} flights are in the topic {TOPIC!r}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
