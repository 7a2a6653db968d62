"""The embedded queue as a pipeline's producer.

Messages are secured by their very receipt: the lease that receives them is in the file before the
first callback sees them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from airflow_broadway.core.custody.producer import Connection, Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import (
    Custodian,
    Entry,
    Lease,
    QueueDepth,
    Settlement,
    SettleReport,
    Source,
)
from airflow_broadway.core.errors import ConnectionMissing, OptionsError, ProducerError
from airflow_broadway.core.model.message import Message
from airflow_broadway.core.model.options import option, options
from airflow_broadway.core.model.rules import AUTO, CONN_ID, SECONDS, TEXT, Rule
from airflow_broadway.producers.sqlite.queue import KIND, SqliteQueue

__all__ = ["DEFAULT_CONNECTION", "SqliteProducer", "path_of"]

log = logging.getLogger(__name__)

#: The connection that names the queue file where no path is given.
DEFAULT_CONNECTION = "broadway_sqlite_default"

#: Types of connections that name a file in their host.
_TYPES = ("broadway_sqlite", "sqlite", "generic", "")

#: Seconds between two looks at an empty queue: the first, and the longest.
_PAUSES = (0.02, 0.5)

_ABSOLUTE = Rule(
    "an absolute path, the same file for every task",
    lambda v: isinstance(v, str) and Path(v).expanduser().is_absolute(),
)


@options
class SqliteProducer(Producer):
    """Messages from an embedded queue: see ``docs/embedded-queue.md``.

    ``on_success`` and ``on_failure`` take ``"ack"``, ``"retry"``, ``"dead_letter"`` and ``"noop"``,
    which leaves the message in the queue: it is delivered again when the lease would have lapsed.
    """

    kind: ClassVar[str] = KIND

    queue: str = option(rule=TEXT, doc="The queue's name in its file.")
    path: str | None = option(
        default=None,
        rule=_ABSOLUTE.or_none(),
        doc="The queue file: an absolute path, on a disk of this machine.  Instead of ``conn_id``.",
    )
    conn_id: str | None = option(
        default=AUTO,
        rule=CONN_ID.or_none(),
        doc="The Airflow connection whose host, or extra ``path``, is the queue file;"
        f" ``{DEFAULT_CONNECTION}`` unless ``path`` is given.",
    )
    busy_timeout: float = option(
        default=30.0, rule=SECONDS, doc="Seconds to wait while another process writes to the file."
    )

    def _resolve(self) -> None:
        super()._resolve()
        self._default("conn_id", DEFAULT_CONNECTION if self.path is None else None)
        if self.path is not None and self.conn_id is not None:
            raise OptionsError(
                "SqliteProducer.conn_id", "nothing beside 'path': one of the two", self.conn_id
            )
        if self.path is None and self.conn_id is None:
            raise OptionsError.missing(
                "SqliteProducer.path",
                'SqliteProducer(path="/data/queue.db", …), or the id of a connection as conn_id',
            )

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


def path_of(connection: Connection) -> str:
    """The queue file that a connection names, in its host or in the extra ``path``.

    :raises ConnectionMissing: If it names none, or two, or is of another service.
    """
    shown = f"the connection {connection.conn_id!r}"
    if connection.conn_type not in _TYPES:
        raise ConnectionMissing(
            f"{shown} is of type {connection.conn_type!r}; an embedded queue needs one of type"
            " 'broadway_sqlite', with the path of the queue file as its host"
        )
    extra = connection.extra.get("path") or ""
    if connection.host and extra and connection.host != extra:
        raise ConnectionMissing(f"{shown} names two files, as host and as extra 'path': keep one")
    path = connection.host or extra
    if not _ABSOLUTE.holds(path):
        raise ConnectionMissing(
            f"{shown} names no queue file: its host must be an absolute path, got: {path!r}"
        )
    return str(path)


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
        pause, longest = _PAUSES
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
        here = _state(self._queue)["queue"]
        if lease.kind != KIND or lease.state.get("queue", here) != here:
            raise ProducerError(
                f"the lease of generation {lease.generation!r} is of {lease.kind} queue"
                f" {lease.state.get('queue')!r}, and this producer's is {KIND} queue {here!r}: give"
                " both halves of the run the same options"
            )
        return lease.generation


def _state(queue: SqliteQueue) -> dict[str, Any]:
    return {"path": queue.path, "queue": queue.name}
