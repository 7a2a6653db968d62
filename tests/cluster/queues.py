"""The queues of the cluster, accessed with the brokers' client libraries."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pika

from tests.kafka_server import ApacheKafka
from tests.rabbitmq_server import RabbitServer
from tests.sqs_server import SqsServer

#: Seconds within which unacknowledged or invisible messages must be released after a run: by the
#: lease of a killed process, or the connection timeout of a disconnected host.
_HELD = 300.0


class Queue(ABC):
    """A source queue, which is empty before each case.

    :param dag_id: The DAG that drains it.
    """

    def __init__(self, dag_id: str) -> None:
        self.dag_id = dag_id

    @abstractmethod
    def fill(self, bodies: Iterable[bytes]) -> None:
        """Sends messages and waits for the broker's confirmations."""

    def backlog(self) -> int:
        """Waits until no message is held; returns the number of ready messages.

        :raises RuntimeError: If messages are still held after five minutes.
        """
        end = time.monotonic() + _HELD
        while held := self._held():
            if time.monotonic() > end:
                raise RuntimeError(f"{self.dag_id}: messages are still held: {held}")
            time.sleep(0.5)
        return self._ready()

    @abstractmethod
    def _held(self) -> Any:
        """Returns a truthy value if the broker holds messages for consumers."""

    @abstractmethod
    def _ready(self) -> int:
        """Returns the number of messages that a consumer would receive."""

    @abstractmethod
    def take_dead_letters(self) -> Iterator[bytes]:
        """Receives and removes all dead letters."""


class RabbitMQQueue(Queue):
    """A quorum queue.

    :param name: The queue.
    """

    def __init__(self, dag_id: str, server: RabbitServer, name: str) -> None:
        super().__init__(dag_id)
        self._server, self._name = server, name
        server.declare(name, **{"x-queue-type": "quorum"})

    def fill(self, bodies: Iterable[bytes]) -> None:
        self._server.fill(self._name, bodies)

    def _names(self) -> list[str]:
        # Holding queues are named after the queue, with a number.
        held = f"broadway.held.{self._name}."
        return [self._name, *self._server.queue_names(held)]

    def _held(self) -> Any:
        rows = self._server.control("list_queues", "-q", "name", "messages_unacknowledged")
        counts = dict(line.split() for line in rows.splitlines())
        return {name: counts[name] for name in self._names() if counts.get(name, "0") != "0"}

    def _ready(self) -> int:
        return self._server.count(*self._names())

    def take_dead_letters(self) -> Iterator[bytes]:
        with self._server.channel() as channel:
            while True:
                try:
                    method, _, body = channel.basic_get(
                        f"broadway.dead.{self._name}", auto_ack=True
                    )
                except pika.exceptions.ChannelClosedByBroker:  # the queue does not exist
                    return
                if method is None:
                    return
                yield body


class SqsQueue(Queue):
    """A standard queue with a redrive policy."""

    def __init__(self, dag_id: str, server: SqsServer, name: str) -> None:
        super().__init__(dag_id)
        self._server = server
        self._dead = server.queue(f"{name}-dead")
        arn = server.client().get_queue_attributes(QueueUrl=self._dead, AttributeNames=["QueueArn"])
        policy = {"deadLetterTargetArn": arn["Attributes"]["QueueArn"], "maxReceiveCount": 20}
        self._url = server.queue(name, RedrivePolicy=json.dumps(policy))

    def fill(self, bodies: Iterable[bytes]) -> None:
        client = self._server.client(max_pool_connections=8)

        def send(bodies: list[bytes]) -> None:
            entries = [
                {"Id": str(n), "MessageBody": body.decode()} for n, body in enumerate(bodies)
            ]
            answer = client.send_message_batch(QueueUrl=self._url, Entries=entries)
            assert not answer.get("Failed"), answer["Failed"][0]

        left = iter(bodies)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(send, iter(lambda: list(islice(left, 10)), [])))

    def _held(self) -> Any:
        _, hidden, delayed = self._server.depth(self._url)
        return hidden + delayed

    def _ready(self) -> int:
        return self._server.depth(self._url)[0]

    def take_dead_letters(self) -> Iterator[bytes]:
        client = self._server.client()
        while messages := client.receive_message(
            QueueUrl=self._dead, MaxNumberOfMessages=10, WaitTimeSeconds=0
        ).get("Messages"):
            for message in messages:
                client.delete_message(QueueUrl=self._dead, ReceiptHandle=message["ReceiptHandle"])
                yield message["Body"].encode()


class KafkaTopic(Queue):
    """A topic with retry and dead-letter topics; the consumer group has the same name."""

    def __init__(self, dag_id: str, server: ApacheKafka, name: str) -> None:
        super().__init__(dag_id)
        self._server, self._name, self._taken = server, name, 0
        server.topic(name, partitions=4)
        server.topic(f"{name}.retry")
        server.topic(f"{name}-dlt")

    def fill(self, bodies: Iterable[bytes]) -> None:
        self._server.fill(self._name, bodies)

    def _held(self) -> Any:
        return 0  # the broker knows offsets only, not the package's claims

    def _ready(self) -> int:
        topics = self._name, f"{self._name}.retry"
        return sum(self._server.lag(self._name, topic) for topic in topics)

    def take_dead_letters(self) -> Iterator[bytes]:
        messages = self._server.read(f"{self._name}-dlt", start=self._taken)
        self._taken += len(messages)
        yield from filter(None, (message.value() for message in messages))
