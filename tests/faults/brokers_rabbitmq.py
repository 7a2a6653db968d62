"""RabbitMQ in the fault runs: a server that only this run uses.

The management API lists the queues.  AMQP counts their messages, because the API's counts lag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from airflow_broadway.producers.rabbitmq.broker.holding_queues import LADDER, QueueNames
from tests.faults.broker import DeadLetter
from tests.rabbitmq_server import RabbitServer

_QUEUES = QueueNames("killed")


class RabbitMQ:
    """The queue ``killed`` and its holding queues."""

    stable_ids = False

    def __init__(self, folder: Path) -> None:
        self.server = RabbitServer.start(folder / "rabbitmq")
        self.server.declare("killed")

    def variables(self) -> Mapping[str, str]:
        return {"AIRFLOW_CONN_KILLED_RABBITMQ": json.dumps(self.server.connection())}

    def send(self, bodies: Sequence[bytes]) -> None:
        self.server.fill("killed", bodies)

    def waiting(self) -> int:
        """Counts the source, delay and holding queues; a bundle counts as one message."""
        delays = [_QUEUES.delay(step) for step in LADDER]
        return self.server.count("killed", *delays) + self.leased()

    def leased(self) -> int:
        return self.server.count(*self.server.queue_names("broadway.held."))

    def dead_letters(self) -> list[DeadLetter]:
        return dead_letters(self.server, _QUEUES.dead)

    def close(self) -> None:
        self.server.stop()


def dead_letters(server: RabbitServer, queue: str) -> list[DeadLetter]:
    """Reads all dead letters of a queue and leaves them there."""
    letters: list[DeadLetter] = []
    remaining = server.count(queue)
    if not remaining:
        return []
    with server.channel() as channel:
        # Not 0: then a quorum queue delivers only 2,000 messages.
        channel.basic_qos(prefetch_count=min(remaining, 65_535))
        for _, properties, body in channel.consume(queue, inactivity_timeout=20.0):
            if properties is None:
                raise AssertionError(f"{queue} does not deliver its last {remaining} messages")
            headers = properties.headers or {}
            attempt, reason = headers["x-broadway-attempt"], headers["x-broadway-reason"]
            marked = bool(headers.get("x-broadway-redelivered"))
            letters.append(DeadLetter(int(body), int(attempt), str(reason), marked))
            remaining -= 1
            if not remaining:
                break
    return letters  # closing the connection requeues them
