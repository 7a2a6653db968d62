"""The embedded queue as a pipeline's producer.

Messages are secured by their very receipt: the lease that receives them is in the file before the
first callback sees them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

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
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import options
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.sqlite.options import SqliteOptions, path_of
from airflow_broadway.producers.sqlite.queue import SqliteQueue
from airflow_broadway.producers.sqlite.records import KIND

__all__ = ["SqliteProducer"]

log = logging.getLogger(__name__)

#: Seconds between two looks at an empty queue: the first, and the longest.
_POLL_INTERVALS = (0.02, 0.5)


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
        _warn_if_unknown(queue)
        return _Source(queue, env, self.lease)

    def custodian(self, env: ProducerEnv) -> Custodian:
        return _Custodian(self.open_queue(env))

    def depth(self, env: ProducerEnv) -> QueueDepth:
        with self.open_queue(env) as queue:
            return queue.depth()

    def leases(self, env: ProducerEnv) -> list[Lease]:
        """The open leases of this queue, with their owners, for sweeps."""
        with self.open_queue(env) as queue:
            return [record.lease for record in queue.leases()]


def _warn_if_unknown(queue: SqliteQueue) -> None:
    """Say that nothing was ever sent to a queue of this name: it may be mistyped.

    :raises ProducerError: If the file cannot be used.
    """
    names = queue.names()
    if names is None:
        log.warning(
            "there is no queue file %s yet: queue %r is empty until something is sent to it",
            queue.path,
            queue.name,
        )
    elif queue.name not in names:
        log.warning(
            "the queue file %s has no queue %r; it has %s: nothing was ever sent to it",
            queue.path,
            queue.name,
            names,
        )


class _Source:
    """Receives for one generation."""

    def __init__(self, queue: SqliteQueue, env: ProducerEnv, seconds: float) -> None:
        self._queue = queue
        self._clock = env.clock
        self._position = 0
        self._stopped = False
        self._lease = Lease(
            kind=KIND,
            generation=env.generation,
            seconds=seconds,
            deadline=self._deadline(seconds),
            owner=dict(env.owner),
            state=_state(queue),
        )

    @property
    def lease(self) -> Lease:
        return self._lease

    def receive(self, demand: int, *, timeout: float) -> Sequence[Message]:
        if self._stopped:
            return []
        limit = self._clock.monotonic() + timeout
        pause, longest = _POLL_INTERVALS
        while True:
            lease = self._lease
            deadline = self._deadline(lease.seconds)
            messages = self._queue.receive(
                lease.generation,
                demand,
                seconds=lease.seconds,
                owner=lease.owner,
                position=self._position,
            )
            if messages or not self._position:  # what holds nothing cannot lapse
                self._lease = replace(lease, deadline=deadline)
            self._position += len(messages)
            left = limit - self._clock.monotonic()
            if messages or demand < 1 or left < 1e-6:  # a clock may have no finer step
                return messages
            self._clock.sleep(min(pause, left))
            pause = min(2 * pause, longest)

    def secure(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages

    def stop(self) -> Sequence[Message]:
        self._stopped = True  # a receipt is a row's lease: nothing is ever under way
        return []

    def close(self) -> None:
        self.stop()
        self._queue.close()

    def _deadline(self, seconds: float) -> datetime:
        return self._clock.now() + timedelta(seconds=seconds)


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


def _state(queue: SqliteQueue) -> dict[str, Any]:
    return {"path": queue.path, "queue": queue.name}
