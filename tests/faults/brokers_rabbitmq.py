"""RabbitMQ in the fault runs: a server of the run's own, asked by AMQP and by its management API.

The API names the queues; how many messages are in each is asked by AMQP, which answers of now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from airflow_broadway.producers.rabbitmq.broker.holding_queues import LADDER, QueueNames
from tests.faults.broker import Dead
from tests.rabbitmq_server import RabbitServer

_QUEUES = QueueNames("killed")


class RabbitMQ:
    """A queue at a server that a run may kill."""

    stable_ids = False

    def __init__(self, folder: Path) -> None:
        self.server = RabbitServer.start(folder / "rabbitmq")
        self.server.declare("killed")

    def variables(self) -> Mapping[str, str]:
        return {"AIRFLOW_CONN_KILLED_RABBITMQ": json.dumps(self.server.connection())}

    def send(self, bodies: Sequence[bytes]) -> None:
        self.server.fill("killed", bodies)

    def waiting(self) -> int:
        """A bundle counts as one message; the dead-letter worker of a queue is not seen."""
        delays = [_QUEUES.delay(step) for step in LADDER]
        return self.server.count("killed", *delays) + self.leased()

    def leased(self) -> int:
        return self.server.count(*self.server.queue_names("broadway.held."))

    def dead(self) -> list[Dead]:
        return dead_letters(self.server, _QUEUES.dead)

    def close(self) -> None:
        self.server.stop()


def dead_letters(server: RabbitServer, queue: str) -> list[Dead]:
    """All dead letters, which stay where they are."""
    letters: list[Dead] = []
    left = server.count(queue)
    if not left:
        return []
    with server.channel() as channel:
        # Not 0: a quorum queue then sends 2,000 ahead and no more.
        channel.basic_qos(prefetch_count=min(left, 65_535))
        for _, properties, body in channel.consume(queue, inactivity_timeout=20.0):
            if properties is None:
                raise AssertionError(f"{left} messages of {queue} do not come")
            headers = properties.headers or {}
            attempt, reason = headers["x-broadway-attempt"], headers["x-broadway-reason"]
            marked = bool(headers.get("x-broadway-redelivered"))
            letters.append(Dead(int(body), int(attempt), str(reason), marked))
            left -= 1
            if not left:
                break
    return letters  # closing the connection gives them back
