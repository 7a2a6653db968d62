"""RabbitMQ in the fault runs: a server of the run's own, asked by AMQP and by its management API.

The API names the queues; how many messages are in each is asked by AMQP, which answers of now.
"""

from __future__ import annotations

import json
import time
import urllib.request
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pika

from airflow_broadway.producers.rabbitmq.broker.names import LADDER, QueueNames
from tests.faults.broker import Dead
from tests.rabbitmq_server import RabbitServer

__all__ = ["RabbitMQ", "counted", "dead_letters", "queue_names"]

_QUEUES = QueueNames("killed")


class RabbitMQ:
    """A queue at a server that a run may kill."""

    stable_ids = False

    def __init__(self, folder: Path) -> None:
        self.server = RabbitServer.start(folder / "rabbitmq")
        with _channel(self.server) as channel:
            channel.queue_declare("killed", durable=True)

    def variables(self) -> Mapping[str, str]:
        host, port = self.server.address
        connection = {
            "conn_type": "rabbitmq",
            "host": host,
            "port": port,
            "login": "guest",
            "password": "guest",
        }
        return {"AIRFLOW_CONN_KILLED_RABBITMQ": json.dumps(connection)}

    def send(self, bodies: Sequence[bytes]) -> None:
        with _channel(self.server) as channel:
            for body in bodies:
                channel.basic_publish("", "killed", body, pika.BasicProperties(delivery_mode=2))
        while counted(self.server, ["killed"]) < len(bodies):
            time.sleep(0.05)

    def waiting(self) -> int:
        """A bundle counts as one message; the dead-letter worker of a queue is not seen."""
        delays = [_QUEUES.delay(step) for step in LADDER]
        return counted(self.server, ["killed", _QUEUES.returns, *delays]) + self.leased()

    def leased(self) -> int:
        leases = [name for name in queue_names(self.server) if name.startswith("broadway.lease.")]
        return counted(self.server, leases)

    def dead(self) -> list[Dead]:
        return dead_letters(self.server, _QUEUES.dead)

    def close(self) -> None:
        self.server.stop()


class _channel(closing[pika.adapters.blocking_connection.BlockingChannel]):  # noqa: N801
    """A channel for a few calls, with its connection."""

    def __init__(self, server: RabbitServer) -> None:
        self._connection = pika.BlockingConnection(pika.URLParameters(server.url))
        super().__init__(self._connection.channel())

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def queue_names(server: RabbitServer) -> list[str]:
    """All queues there are, by the management API."""
    request = urllib.request.Request(
        f"http://{server.address[0]}:{server.management_port}/api/queues?columns=name&disable_stats=true",
        headers={"Authorization": "Basic " + b64encode(b"guest:guest").decode()},
    )
    with urllib.request.urlopen(request, timeout=20) as reply:
        return [str(queue["name"]) for queue in json.load(reply)]


def counted(server: RabbitServer, queues: Sequence[str]) -> int:
    """Messages that are ready in queues, of which some need not exist."""
    total = 0
    with _channel(server) as channel:
        connection = channel.connection
        for name in queues:
            try:
                total += int(channel.queue_declare(name, passive=True).method.message_count)
            except pika.exceptions.ChannelClosedByBroker:
                channel = connection.channel()
    return total


def dead_letters(server: RabbitServer, queue: str) -> list[Dead]:
    """All dead letters, which stay where they are."""
    found: list[Dead] = []
    with _channel(server) as channel:
        try:
            left = int(channel.queue_declare(queue, passive=True).method.message_count)
        except pika.exceptions.ChannelClosedByBroker:
            return []
        if not left:
            return []
        # Not 0: a quorum queue then sends 2,000 ahead and no more.
        channel.basic_qos(prefetch_count=min(left, 65_535))
        for _, properties, body in channel.consume(queue, inactivity_timeout=20.0):
            if properties is None:
                raise AssertionError(f"{left} messages of {queue} do not come")
            headers = properties.headers or {}
            attempt, reason = headers["x-broadway-attempt"], headers["x-broadway-reason"]
            marked = bool(headers.get("x-broadway-redelivered"))
            found.append(Dead(int(body), int(attempt), str(reason), marked))
            left -= 1
            if not left:
                break
    return found  # closing the connection gives them back
