"""The producer for the embedded queue.

A receive also secures its messages: their lease is committed to the file before any callback gets
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Final

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import (
    Custodian,
    Entry,
    Lease,
    QueueDepth,
    Settlement,
    Source,
)
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import ConnectionMissing, OptionsError, ProducerError
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import AUTO, CONN_ID, SECONDS, TEXT, Rule
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.sqlite.queue import KIND, SqliteQueue

#: Seconds between two polls of an empty queue: initially, and at most.
_SHORTEST_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.5


#: The default connection, if no path is set.
DEFAULT_CONNECTION = "broadway_sqlite_default"

#: Types of connections whose host is a file.
_TYPES = ("broadway_sqlite", "sqlite", "generic", "")

_ABSOLUTE = Rule(
    "an absolute path, the same file for every task",
    lambda v: isinstance(v, str) and Path(v).expanduser().is_absolute(),
)


@options
class SqliteProducer(Producer):
    """The producer for an embedded queue; see ``docs/embedded-queue.md``.

    ``on_success`` and ``on_failure`` accept ``"ack"``, ``"retry"``, ``"dead_letter"`` and
    ``"noop"``, which leaves the message in the queue and redelivers it at the lease's deadline.
    """

    kind: ClassVar[str] = KIND
    local_clock: ClassVar[bool] = True
    sent_at: ClassVar[tuple[str, ...]] = ("enqueued_at",)

    queue: str = option(rule=TEXT, doc="The queue's name in its file.")
    path: str | None = option(
        default=None,
        rule=_ABSOLUTE.or_none(),
        doc="The queue file, on a disk of this machine; instead of ``conn_id``.",
    )
    conn_id: str | None = option(
        default=AUTO,
        rule=CONN_ID.or_none(),
        doc="The connection whose host, or extra ``path``, is the queue file.",
    )
    busy_timeout: float = option(
        default=30.0, rule=SECONDS, doc="How long to wait while another process writes to the file."
    )

    def _resolve(self) -> None:
        super()._resolve()
        self._default("conn_id", DEFAULT_CONNECTION if self.path is None else None)
        if self.path is not None and self.conn_id is not None:
            raise OptionsError(
                "SqliteProducer.conn_id", "no value with 'path': use one of the two", self.conn_id
            )
        if self.path is None and self.conn_id is None:
            raise OptionsError.missing(
                "SqliteProducer.path",
                'SqliteProducer(path="/data/queue.db", …), or the id of a connection as conn_id',
            )

    def open_queue(self, env: ProducerEnv) -> SqliteQueue:
        """Creates the queue object; its first call opens the file.

        :raises ConnectionMissing: If the connection is missing or names no file.
        """
        path = self.path or path_of(env.connections.get(str(self.conn_id)))
        return SqliteQueue(path, self.queue, clock=env.clock, busy_timeout=self.busy_timeout)

    def source(self, env: ProducerEnv) -> Source:
        queue = self.open_queue(env)
        queue.check()
        return _Source(self, queue, env)

    def custodian(self, env: ProducerEnv) -> Custodian:
        return _Custodian(self.open_queue(env))

    def check(self, env: ProducerEnv) -> list[Finding]:
        with self.open_queue(env) as queue:
            queue.check()
        return []

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        with self.open_queue(env) as queue:
            # On another machine, e.g. that of the API server, the file may not exist.
            return None if queue.names() is None else queue.depth()

    def datasets(self, env: ProducerEnv) -> Sequence[tuple[str, str]]:
        return [
            ("file", f"{self.path or path_of(env.connections.get(str(self.conn_id)))}/{self.queue}")
        ]

    def dead_letters(self, env: ProducerEnv, *, place: str | None = None) -> DeadLetters:
        queue = self.open_queue(env)
        if place not in (None, queue.name):
            raise ProducerError(
                f"the dead letters of the queue {queue.name!r} lie with it, and not in {place!r}:"
                " leave the place out"
            )
        return queue


def path_of(connection: Connection) -> str:
    """Returns the queue file of a connection, from its host or its extra ``path``.

    :raises ConnectionMissing: If there is none, or two, or the connection has another type.
    """
    label = f"the connection {connection.conn_id!r}"
    if connection.conn_type not in _TYPES:
        raise ConnectionMissing(
            f"{label} is of type {connection.conn_type!r}; an embedded queue needs one of type"
            " 'broadway_sqlite', with the path of the queue file as its host"
        )
    extra = connection.extra.get("path") or ""
    if connection.host and extra and connection.host != extra:
        raise ConnectionMissing(f"{label} names two files, as host and as extra 'path': keep one")
    path = connection.host or extra
    if not _ABSOLUTE.holds(path):
        raise ConnectionMissing(
            f"{label} names no queue file: its host must be an absolute path, got: {path!r}"
        )
    return str(path)


class _Source:
    """Receives for one generation, and polls while the queue is empty.

    Each poll that returns messages extends the lease of the whole generation.  Nothing is
    prefetched, so no message is in flight when the source stops.
    """

    def __init__(self, producer: SqliteProducer, queue: SqliteQueue, env: ProducerEnv) -> None:
        self._queue, self._clock = queue, env.clock
        self._received = 0
        self._stopped = False
        self._lease = Lease(
            kind=KIND,
            generation=env.generation,
            seconds=producer.lease,
            deadline=env.clock.now() + timedelta(seconds=producer.lease),
            owner=dict(env.owner),
            state={"path": queue.path, "queue": queue.name},
        )

    @property
    def lease(self) -> Lease:
        return self._lease

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        end = self._clock.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        while demand > 0 and not self._stopped:
            lease = self._lease
            deadline = self._clock.now() + timedelta(seconds=lease.seconds)
            messages = self._queue.receive(
                lease.generation,
                demand,
                seconds=lease.seconds,
                owner=lease.owner,
                position=self._received,
            )
            if messages or not self._received:  # a lease without messages cannot lapse
                self._lease = replace(lease, deadline=deadline)
            self._received += len(messages)
            left = end - self._clock.monotonic()
            if messages or left < 1e-6:  # below the resolution of some clocks
                return messages
            self._clock.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return []

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def stop(self) -> Sequence[Message]:
        self._stopped = True
        return []

    def close(self) -> None:
        self.stop()
        self._queue.close()


class _Custodian:
    """Extends and settles the leases of one queue."""

    def __init__(self, queue: SqliteQueue) -> None:
        self._queue = queue

    def renew(self, lease: Lease) -> Lease | None:
        deadline = self._queue.renew(self._generation(lease), lease.seconds)
        return None if deadline is None else replace(lease, deadline=deadline)

    def holds(self, lease: Lease) -> bool:
        return self._queue.holds(self._generation(lease))

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        return self._queue.settle(self._generation(lease), settlement)

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        return self._queue.settle_now(self._generation(lease), entries)

    def close(self) -> None:
        self._queue.close()

    def _generation(self, lease: Lease) -> str:
        """Returns the lease's generation, after checking that it belongs to this queue."""
        return check_lease(lease, KIND, self._queue.name).generation
