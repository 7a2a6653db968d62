"""The queues of the click tests, and their depths."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.broker.holding_queues import LADDER, QueueNames
from airflow_broadway.producers.sqlite import SqliteQueue
from tests.rabbitmq_fixtures import wanted_server


class ClickQueue(Protocol):
    """A queue of one test's own."""

    def depth(self) -> tuple[int, int, int]:
        """Returns the numbers of ready, leased, and dead messages."""
        ...


class Server(Protocol):
    """The server of all tests' queues."""

    #: The prefix of its DAG ids.
    prefix: str

    def variables(self) -> Mapping[str, str]:
        """Returns environment variables for Airflow: the connection."""
        ...

    def queue(self, name: str, count: int) -> ClickQueue:
        """Creates a queue with the numbers below ``count`` in it."""
        ...


class _Sqlite:
    """The embedded queue."""

    prefix = ""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "queue.db"

    def variables(self) -> Mapping[str, str]:
        connection = {"conn_type": "broadway_sqlite", "host": str(self._path)}
        return {"AIRFLOW_CONN_CLICKED_QUEUE": json.dumps(connection)}

    def queue(self, name: str, count: int) -> ClickQueue:
        queue = SqliteQueue(self._path, name)
        queue.send([b"%d" % number for number in range(count)])
        return _SqliteQueue(queue)


class _SqliteQueue:
    def __init__(self, queue: SqliteQueue) -> None:
        self._queue = queue

    def depth(self) -> tuple[int, int, int]:
        queue_depth = self._queue.depth()
        leased = queue_depth.leased or len(self._queue.leases())  # a lease without messages too
        return queue_depth.ready, leased, queue_depth.dead


class _Rabbit:
    """The RabbitMQ of this process's tests."""

    prefix = "rabbitmq_"

    def __init__(self, folder: Path) -> None:
        self.server = wanted_server()

    def variables(self) -> Mapping[str, str]:
        return {"AIRFLOW_CONN_CLICKED_RABBITMQ": json.dumps(self.server.connection())}

    def queue(self, name: str, count: int) -> ClickQueue:
        self.server.declare(name)
        self.server.fill(name, (b"%d" % number for number in range(count)))
        return _RabbitQueue(self, name)


class _RabbitQueue:
    def __init__(self, rabbit: _Rabbit, name: str) -> None:
        self._server = rabbit.server
        self._queues = QueueNames(name)

    def depth(self) -> tuple[int, int, int]:
        queues, count = self._queues, self._server.count
        names = [queues.held(number) for number in range(9)]
        delays = [queues.delay(step) for step in LADDER]
        return (
            count(queues.source, *delays),
            sum(map(self._bundled, names)),
            count(queues.dead),
        )

    def _bundled(self, queue: str) -> int:
        """Counts the messages in the bundles of a queue, which are requeued."""
        left = self._server.count(queue)
        total = 0
        if left:
            with self._server.channel() as channel:
                for _ in range(left):
                    method, _, body = channel.basic_get(queue)
                    if method is None:
                        break
                    total += bundles.read_header(body)[0].count
        return total


#: The servers by broker name.
SERVERS: Mapping[str, Callable[[Path], Server]] = {"sqlite": _Sqlite, "rabbitmq": _Rabbit}
