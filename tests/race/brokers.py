"""The brokers of the race: each sends numbered messages of 200 bytes, and counts the backlog."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pika

from tests.kafka_server import ApacheKafka
from tests.rabbitmq_server import RabbitServer
from tests.sqs_server import SqsServer

#: A message's body, and the other properties of a message of RabbitMQ.
Envelope = tuple[bytes, dict[str, Any]]
#: Builds the message of a number as a peer's clients would send it to a queue.
Wrap = Callable[[int, str], Envelope]


def payload(number: int) -> bytes:
    """Returns 200 bytes of JSON: the number, the current Unix time, and a text."""
    text = json.dumps({"n": number, "sent": time.time(), "text": ""})
    return (text[:-2] + "x" * (200 - len(text)) + text[-2:]).encode()


def plain(number: int, queue: str) -> Envelope:
    return payload(number), {"content_type": "application/json"}


def of_dramatiq(number: int, queue: str) -> Envelope:
    message = {
        "queue_name": queue,
        "actor_name": "store",
        "args": [json.loads(payload(number))],
        "kwargs": {},
        "options": {},
        "message_id": str(number),
        "message_timestamp": int(time.time() * 1000),
    }
    return json.dumps(message).encode(), {}


def of_celery(number: int, queue: str) -> Envelope:
    body = [[json.loads(payload(number))], {}, {}]
    headers = {"lang": "py", "task": "store", "id": str(number), "root_id": str(number)}
    kind = {"content_type": "application/json", "content_encoding": "utf-8"}
    return json.dumps(body).encode(), {**kind, "headers": headers}


def of_taskiq(number: int, queue: str) -> Envelope:
    names = {"task_id": str(number), "task_name": "store"}
    body = {**names, "labels": {}, "args": [json.loads(payload(number))], "kwargs": {}}
    return json.dumps(body).encode(), {"headers": names}


#: The wraps by the name of the envelope.
WRAPS: dict[str, Wrap] = {
    "plain": plain,
    "dramatiq": of_dramatiq,
    "celery": of_celery,
    "taskiq": of_taskiq,
}


class RabbitMQ:
    """RabbitMQ; the peers declare their queues, each as its client does.

    This and the other brokers have ``connection`` in Airflow's JSON form; ``has``, which creates a
    queue or returns whether its peer has declared it; ``send``, which returns once the broker has
    the messages; ``left``, the messages that are not acknowledged; and ``stop``.
    """

    def __init__(self, folder: Path) -> None:
        self._server = RabbitServer.start(folder)
        # Counts in the management API are at most so many milliseconds old.
        for name in ("collect_statistics_interval", "quorum_tick_interval"):
            self._server.evaluate(f"application:set_env(rabbit, {name}, 200).")
        self.url = self._server.url
        extra = {"management_url": f"http://127.0.0.1:{self._server.management_port}"}
        self.connection = self._server.connection(extra=extra)
        self.stop = self._server.stop

    def has(self, queue: str) -> bool:
        return self._server.depth(queue) is not None

    def send(self, queue: str, numbers: Iterable[int], wrap: Wrap) -> None:
        with self._server.channel() as channel:
            for number in numbers:
                body, properties = wrap(number, queue)
                basic = pika.BasicProperties(**properties, delivery_mode=2, message_id=str(number))
                channel.basic_publish("", queue, body, basic)
            channel.queue_declare(queue, passive=True)

    def left(self, queue: str) -> int:
        path = "queues?disable_stats=true&enable_queue_totals=true"
        rows = self._server.manage("GET", path)
        return sum(row.get("messages", 1) for row in rows if queue in row["name"])


class Kafka:
    """Apache Kafka; a topic of four partitions."""

    def __init__(self, folder: Path) -> None:
        self._server = ApacheKafka.start(folder)
        self.url = self._server.bootstrap
        self.connection = self._server.connection()
        self.stop = self._server.stop

    def has(self, queue: str) -> bool:
        for name, partitions in ((queue, 4), (f"{queue}.retry", 1), (f"{queue}-dlt", 1)):
            self._server.topic(name, partitions)
        return True

    def send(self, queue: str, numbers: Iterable[int], wrap: Wrap) -> None:
        self._server.fill(queue, (wrap(number, queue)[0] for number in numbers))

    def left(self, queue: str) -> int:
        return self._server.lag(queue, queue)


class Sqs:
    """moto's SQS over HTTP; a message in flight is visible again after 10 seconds."""

    def __init__(self, folder: Path) -> None:
        self._server = SqsServer.start(folder)
        self.url = self._server.url
        self.connection = self._server.connection()
        self.stop = self._server.stop
        self._queues: dict[str, str] = {}
        self._client = self._server.client(max_pool_connections=10)

    def has(self, queue: str) -> bool:
        self._queues[queue] = self._server.queue(queue, VisibilityTimeout="10")
        return True

    def send(self, queue: str, numbers: Iterable[int], wrap: Wrap) -> None:
        def send_ten(ten: list[int]) -> None:
            entries = [
                {"Id": str(number), "MessageBody": wrap(number, queue)[0].decode()}
                for number in ten
            ]
            done = self._client.send_message_batch(QueueUrl=self._queues[queue], Entries=entries)
            assert not done.get("Failed"), done

        with ThreadPoolExecutor(10) as pool:
            for _ in pool.map(send_ten, in_tens(numbers)):
                pass

    def left(self, queue: str) -> int:
        return sum(self._server.depth(self._queues[queue]))


def in_tens(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yields ten numbers at a time."""
    rest = iter(numbers)
    while ten := list(islice(rest, 10)):
        yield ten


Broker = RabbitMQ | Kafka | Sqs
