"""RabbitMQ in the traffic tests: pika publishes with confirms and drains; the API lists queues."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pika

from airflow_broadway.producers.rabbitmq.bundle import unpack
from tests.rabbitmq_server import RabbitServer
from tests.traffic.brokers import DEAD, QueuedMessage
from tests.traffic.publisher import body_of, number_of

#: The place of messages by the queue's prefix; ``held`` queues contain bundles.
_PLACES = {"held": "leased", "delay": "delay", "dead": DEAD}


class _Sender:
    """Publishes messages and waits for their confirms.

    :param died: Returns whether the server was killed: then connection errors are expected.
    """

    def __init__(self, url: str, queue: str, died: Callable[[], bool]) -> None:
        self._url = url
        self._queue = queue
        self._died = died
        self._connect()

    def _connect(self) -> None:
        self._tag = 0
        self._waiting: dict[int, int] = {}
        self._confirmed: list[int] = []
        self._connection = pika.BlockingConnection(pika.URLParameters(self._url))
        self._channel = self._connection.channel()
        # pika's blocking channel waits for each confirm before the next publish; its implementation
        # channel does not.
        self._channel._impl.confirm_delivery(self._on_confirm)

    def send(self, numbers: Sequence[int]) -> list[int]:
        self._confirmed = []
        try:
            if not self._connection.is_open:
                self._connect()
            self._publish(numbers)
        except (pika.exceptions.AMQPError, OSError):
            if not self._died():
                raise
            with suppress(pika.exceptions.AMQPError, OSError):
                self.close()  # the next call reconnects to the restarted server
        return self._confirmed

    def _publish(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._tag += 1
            self._waiting[self._tag] = number
            properties = pika.BasicProperties(delivery_mode=2)
            self._channel.basic_publish("", self._queue, body_of(number), properties)
        while self._waiting:
            self._connection.process_data_events(time_limit=1.0)

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        tags = [
            tag
            for tag in self._waiting
            if tag == method.delivery_tag or (method.multiple and tag <= method.delivery_tag)
        ]
        for tag in tags:
            number = self._waiting.pop(tag)
            if method.NAME == "Basic.Ack":
                self._confirmed.append(number)

    def close(self) -> None:
        if self._connection.is_open:
            self._connection.close()


class RabbitMQTraffic:
    """A source queue and its delay, holding and dead-letter queues."""

    kind = "rabbitmq"
    connections: Mapping[str, Mapping[str, Any]] = {}

    def __init__(self, server: RabbitServer, folder: Path, *, queue: str = "classic") -> None:
        self._server = server
        self._name = f"traffic-{uuid.uuid4().hex}"
        self._died = False
        self.use_proxy(server.address[1])
        server.declare(self._name, **{"x-queue-type": queue})

    def address(self) -> tuple[str, int]:
        """Returns host and port of the server."""
        return self._server.address

    def use_proxy(self, port: int) -> None:
        """Makes the next runs connect to the proxy at this port."""
        uri = f"amqp://{self._server.address[0]}:{port}"
        self.options: Mapping[str, Any] = {"queue": self._name, "uri": uri}

    def group_of(self, number: int) -> None:
        pass

    def is_unlocked(self) -> bool:
        return True

    def sender(self) -> _Sender:
        return _Sender(self._server.url, self._name, lambda: self._died)

    def drain(self) -> list[QueuedMessage]:
        return [
            left
            # Delay queues first: their messages expire into the source queue.
            for name in sorted(self._server.queue_names(), key=lambda name: ".delay." not in name)
            for place in [self._place(name)]
            if place
            for left in self._drain_queue(name, place)
        ]

    def _place(self, queue: str) -> str:
        if queue == self._name:
            return "source"
        if not queue.startswith("broadway.") or self._name not in queue:
            return ""
        return _PLACES.get(queue.split(".")[1], "")

    def _drain_queue(self, queue: str, place: str) -> Iterator[QueuedMessage]:
        with self._server.channel() as channel:
            while count := channel.queue_declare(queue, passive=True).method.message_count:
                yield from self._consumed(channel, queue, place, min(count, 65_535))

    def _consumed(
        self, channel: Any, queue: str, place: str, count: int
    ) -> Iterator[QueuedMessage]:
        """Consumes exactly ``count`` messages."""
        channel.basic_qos(prefetch_count=count)
        for number, (method, properties, body) in enumerate(
            channel.consume(queue, inactivity_timeout=20.0), 1
        ):
            if method is None and place == "delay":
                return  # the delays have expired
            assert method is not None, f"{queue} does not deliver its messages"
            if place == "leased":
                # A sweep redelivers and marks them.
                for held in unpack(body)[1]:
                    yield QueuedMessage(number_of(held.body), place, True)
            else:
                ours = any(name.startswith("x-broadway") for name in properties.headers or {})
                yield QueuedMessage(number_of(body), place, ours or method.redelivered)
            if number == count:
                channel.cancel()
                channel.basic_ack(method.delivery_tag, multiple=True)
                return


class RestartableRabbitMQ(RabbitMQTraffic):
    """A queue at a server that is restarted."""

    def __init__(self, server: RabbitServer, folder: Path, **options: str) -> None:
        super().__init__(server, folder, **options)
        # RabbitMQ 3.10 loses a new quorum queue if it is killed within a second.
        time.sleep(2.0)

    def restart(self) -> None:
        """Kills the server with SIGKILL and restarts it."""
        self._died = True
        self._server.kill()
        self._server.run()
