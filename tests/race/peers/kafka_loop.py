"""confluent-kafka: ``consume(10_000, timeout=1)``, a file for what it returns, then a synchronous
``commit()``; no automatic commits, ``session.timeout.ms=6000``."""

import json
import os

from confluent_kafka import Consumer
from writer import write

QUEUE = os.environ["RACE_QUEUE"]
consumer = Consumer(
    {
        "bootstrap.servers": os.environ["RACE_URL"],
        "group.id": QUEUE,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "session.timeout.ms": 6000,
    }
)
consumer.subscribe([QUEUE])
while True:
    messages = [m for m in consumer.consume(10_000, timeout=1) if m.error() is None]
    if messages:
        write([json.loads(message.value()) for message in messages])
        consumer.commit(asynchronous=False)
