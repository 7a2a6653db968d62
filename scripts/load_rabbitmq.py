"""The flights that left New York City in 2013, as messages of a RabbitMQ queue.

``python -m scripts.load_rabbitmq --url amqp://guest:guest@127.0.0.1:5672/ --messages 1000`` sends
the first 1,000 to the quorum queue ``flights``; without ``--messages``, all of them.
"""

from __future__ import annotations

import argparse
import json
import sys

from airflow_broadway.producers.rabbitmq.amqp.address import Address, address_of_uri
from airflow_broadway.producers.rabbitmq.amqp.channels import Publisher
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.properties import encode
from scripts.load_flights import add_arguments, flights

QUEUE = "flights"


def load(address: Address, messages: int | None = None, seed: int | None = None) -> int:
    """Sends flights and waits for the confirms; returns their number."""
    connection = ConnectionThread(address)
    try:
        arguments = {"x-queue-type": "quorum"}
        connection.channel().call("queue_declare", queue=QUEUE, durable=True, arguments=arguments)
        publisher = Publisher(connection)
        properties = encode(delivery_mode=2, content_type="application/json")
        count = 0
        for count, flight in enumerate(flights(messages, seed), 1):
            publisher.publish("", QUEUE, properties, json.dumps(flight).encode(), key=str(count))
        refused = publisher.flush()
        if refused:
            why = next(iter(refused.values()))
            raise RuntimeError(f"{len(refused)} messages were refused: {why}")
        return count
    finally:
        connection.close()


def main() -> int:
    """Sends the flights that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="amqp://guest:guest@127.0.0.1:5672/")
    add_arguments(parser)
    args = parser.parse_args()
    count = load(address_of_uri(args.url, name="load_rabbitmq"), args.messages, args.seed)
    print(f"{count:,} flights are in the queue {QUEUE!r}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
