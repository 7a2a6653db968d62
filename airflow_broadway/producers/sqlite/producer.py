"""The embedded queue as a pipeline's producer.

Messages are secured by their very receipt: the lease that receives them is in the file before the
first callback sees them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import (
    Custodian,
    Entry,
    Lease,
    QueueDepth,
    Settlement,
    Source,
)
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.polling_source import PollingSource
from airflow_broadway.producers.sqlite.letters import SqliteDeadLetters
from airflow_broadway.producers.sqlite.options import SqliteOptions, path_of
from airflow_broadway.producers.sqlite.queue import SqliteQueue
from airflow_broadway.producers.sqlite.records import KIND

__all__ = ["SqliteProducer"]

log = logging.getLogger(__name__)


@options
class SqliteProducer(SqliteOptions):
    """Messages from an embedded queue: see ``docs/embedded-queue.md``.

    ``on_success`` and ``on_failure`` take ``"ack"``, ``"retry"``, ``"dead_letter"`` and ``"noop"``,
    which leaves the message in the queue: it is delivered again when the lease would have lapsed.
    """

    def open_queue(self, env: ProducerEnv) -> SqliteQueue:
        """The queue itself; nothing is opened before its first call.

        :raises ConnectionMissing: If the connection is missing or names no file.
        """
        path = self.path
        if path is None:
            path = path_of(env.connections.get(str(self.conn_id)))
        return SqliteQueue(path, self.queue, clock=env.clock, busy_timeout=self.busy_timeout)

    def source(self, env: ProducerEnv) -> Source:
        queue = self.open_queue(env)
        _refuse_unknown(queue)
        return _Source(self, queue, env)

    def custodian(self, env: ProducerEnv) -> Custodian:
        return _Custodian(self.open_queue(env))

    def depth(self, env: ProducerEnv) -> QueueDepth | None:
        with self.open_queue(env) as queue:
            # Elsewhere, as on the API server's machine, there may be no such file.
            return None if queue.names() is None else queue.depth()

    def dead_letters(self, env: ProducerEnv, *, place: str | None = None) -> DeadLetters:
        queue = self.open_queue(env)
        if place not in (None, queue.name):
            raise ProducerError(
                f"the dead letters of the queue {queue.name!r} lie with it, and not in {place!r}:"
                " leave the place out"
            )
        return SqliteDeadLetters(queue)

    def leases(self, env: ProducerEnv) -> list[Lease]:
        """The open leases of this queue, with their owners, for sweeps."""
        with self.open_queue(env) as queue:
            return [record.lease for record in queue.leases()]


def _refuse_unknown(queue: SqliteQueue) -> None:
    """Refuse a file that has no queue of this name: it may be mistyped.

    The first message makes the file: before that there is nothing to compare the name with.

    :raises ProducerError: If the file has no such queue, or cannot be used.
    """
    names = queue.names()
    if names is None:
        log.warning(
            "there is no queue file %s yet: queue %r is empty until something is sent to it",
            queue.path,
            queue.name,
        )
    elif queue.name not in names:
        raise ProducerError(
            f"the queue file {queue.path} has no queue {queue.name!r}; it has {names}: correct the"
            " name, send to it, or make it empty with SqliteQueue(path, name).create()"
        )


class _Source(PollingSource):
    """Receives for one generation."""

    def __init__(self, producer: SqliteOptions, queue: SqliteQueue, env: ProducerEnv) -> None:
        super().__init__(producer, env, {"path": queue.path, "queue": queue.name})
        self._queue = queue

    def take(self, demand: int, position: int, deadline: datetime) -> Sequence[Message]:
        lease = self.lease
        return self._queue.receive(
            lease.generation, demand, seconds=lease.seconds, owner=lease.owner, position=position
        )

    def close(self) -> None:
        super().close()
        self._queue.close()


class _Custodian:
    """Renews and settles any generation of one queue."""

    def __init__(self, queue: SqliteQueue) -> None:
        self._queue = queue

    def renew(self, lease: Lease) -> Lease | None:
        deadline = self._queue.renew(self._checked(lease), lease.seconds)
        return None if deadline is None else replace(lease, deadline=deadline)

    def holds(self, lease: Lease) -> bool:
        return self._queue.holds(self._checked(lease))

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        return self._queue.settle(self._checked(lease), settlement)

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        return self._queue.settle_now(self._checked(lease), entries)

    def close(self) -> None:
        self._queue.close()

    def _checked(self, lease: Lease) -> str:
        """The lease's generation, if it is this queue's to settle."""
        check_lease(lease, KIND, self._queue.name)
        return lease.generation
