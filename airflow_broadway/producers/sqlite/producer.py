"""The embedded queue as a pipeline's producer.

Messages are secured by their very receipt: the lease that receives them is in the file before the
first callback sees them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from airflow_broadway.core.custody.dead_letters import DeadLetters
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import (
    SUSPECTS,
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
from airflow_broadway.producers.kit.open_here import note_closed, note_open
from airflow_broadway.producers.kit.polling_source import PollingSource
from airflow_broadway.producers.kit.reports import about_set_aside
from airflow_broadway.producers.kit.state_files import digest, state_files
from airflow_broadway.producers.kit.suspects import Deaths, divide, dying, is_suspect, why_crashed
from airflow_broadway.producers.sqlite.letters import SqliteDeadLetters
from airflow_broadway.producers.sqlite.options import SqliteOptions, path_of
from airflow_broadway.producers.sqlite.queue import SqliteQueue
from airflow_broadway.producers.sqlite.records import KIND

__all__ = ["SqliteProducer"]

log = logging.getLogger(__name__)

#: Days for which it is known that processes died of a message.
_KEPT_DAYS: Final = 30


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
        return _Source(self, queue, env)

    def custodian(self, env: ProducerEnv) -> Custodian:
        queue = self.open_queue(env)
        return _Custodian(queue, _deaths(queue, env), env)

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


def _deaths(queue: SqliteQueue, env: ProducerEnv) -> Deaths:
    """The deaths that are counted of the queue's messages, in the runs' staging folder."""
    folder = f"sqlite/{digest(f'{queue.path} {queue.name}')}"
    return Deaths(state_files(env.staging, folder), _KEPT_DAYS)


class _Source(PollingSource):
    """Receives for one generation."""

    def __init__(self, producer: SqliteOptions, queue: SqliteQueue, env: ProducerEnv) -> None:
        super().__init__(producer, env, {"path": queue.path, "queue": queue.name})
        self._queue = queue
        self._most = producer.max_crashes
        self._deaths = _deaths(queue, env)
        deaths = self._deaths.everything(env.clock.now(), self._most)
        #: What processes died of, and how often.
        self._suspects = {
            key: count for key, count in deaths.items() if is_suspect(count, self._most)
        }
        #: Of these what it is to take, and nothing else.
        self._portion: Sequence[str] = ()
        #: Whether it holds suspects, and must take nothing else.
        self._alone = False
        #: Messages that were set aside.
        self._aside = 0
        note_open(self, env.generation)

    def take(self, demand: int, position: int, deadline: datetime) -> Sequence[Message]:
        if self._suspects and not position:
            self._portion = self._portion_of_suspects()
        while self._portion:
            size = len(self._portion)
            chosen, self._portion = self._portion[:demand], self._portion[demand:]
            found = self._take(len(chosen), position, only=chosen)
            if found:
                if not self._alone:
                    log.warning(
                        "Processes died of %s and others, %d times: a portion of %d is handled, and"
                        " nothing else in this run.",
                        chosen[0],
                        self._suspects[chosen[0]],
                        size,
                    )
                self._alone = True
                self._lease = replace(self.lease, state={**self.lease.state, SUSPECTS: True})
                return found
        if self._alone:
            return []
        return self._take(demand, position, without=self._suspects)

    def _take(self, demand: int, position: int, **chosen: Collection[str]) -> Sequence[Message]:
        lease = self.lease
        return self._queue.receive(
            lease.generation,
            demand,
            seconds=lease.seconds,
            owner=lease.owner,
            position=position,
            **chosen,
        )

    def _portion_of_suspects(self) -> Sequence[str]:
        """A portion of what processes died of, to be taken with nothing beside it."""
        there = self._queue.free(self._suspects)  # not those that were handled since
        by_deaths = sorted(there, key=lambda key: (-self._suspects[key], key))
        division = divide(
            by_deaths,
            self._suspects.__getitem__,
            room=len(by_deaths),
            fresh=True,
            max_crashes=self._most,
        )
        assert division is not None
        if division.crashed:
            self._set_aside(division.crashed)
        return division.take

    def _set_aside(self, ids: Sequence[str]) -> None:
        reasons = {key: why_crashed(self._suspects[key]) for key in ids}
        done = self._queue.set_aside(reasons, self.lease.generation)
        for key in done:
            del self._suspects[key]
            log.error("%s is set aside: %s.", key, reasons[key])
        self._deaths.forget(done, self._clock.now())
        if done:
            self._aside += len(done)
            state = {**self.lease.state, "set_aside": {"crashed": self._aside}}
            self._lease = replace(self.lease, state=state)

    def close(self) -> None:
        note_closed(self)
        super().close()
        self._queue.close()


class _Custodian:
    """Renews and settles any generation of one queue."""

    def __init__(self, queue: SqliteQueue, deaths: Deaths, env: ProducerEnv) -> None:
        self._queue = queue
        self._deaths = deaths
        self._clock = env.clock

    def renew(self, lease: Lease) -> Lease | None:
        deadline = self._queue.renew(self._checked(lease), lease.seconds)
        return None if deadline is None else replace(lease, deadline=deadline)

    def holds(self, lease: Lease) -> bool:
        return self._queue.holds(self._checked(lease))

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        generation, queue, now = self._checked(lease), self._queue, self._clock.now()
        dead = dying(generation, settlement, lambda: queue.held(generation))
        alone = len(dead) == 1 and queue.received(generation) == 1
        self._deaths.count(generation, dead, now, alone=alone)
        suspects = queue.held(generation) if lease.state.get(SUSPECTS) else []
        report = queue.settle(generation, settlement)
        if report.again is not None:
            again = report.again
            self._deaths.forget([each for each in suspects if not again.has(each)], now)
        return report + SettleReport(errors=about_set_aside(lease))

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        return self._queue.settle_now(self._checked(lease), entries)

    def close(self) -> None:
        self._queue.close()

    def _checked(self, lease: Lease) -> str:
        """The lease's generation, if it is this queue's to settle."""
        check_lease(lease, KIND, self._queue.name)
        return lease.generation
