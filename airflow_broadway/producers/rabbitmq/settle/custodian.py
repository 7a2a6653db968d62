"""The custodian of a pipeline: settles leases, from any process that has the lease."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.reports import about_set_aside, report_of
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import (
    Attempts,
    Blocked,
    ConnectionThread,
)
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions
from airflow_broadway.producers.rabbitmq.settle.settlement import (
    LeaseSettlement,
    Outbox,
    Turn,
    held_of,
    unheld_report,
)

log = logging.getLogger(__name__)

#: Seconds to wait for another process's claim of a holding queue.
CLAIM_TIMEOUT = 60.0
#: Attempts at a settlement whose connections are lost only after a while.
_MAX_SETTLE_TRIES = 3

_T = TypeVar("_T")


class RabbitCustodian:
    """Settles the generations of a pipeline, each with the options of its own producer.

    A lease records the producer's index.  There is one connection at a time, to the broker of the
    latest lease's producer.
    """

    def __init__(self, producer: RabbitMQOptions, env: ProducerEnv) -> None:
        self._producer = producer
        self._env = env
        self._clock = env.clock
        self._opened: ConnectionThread | None = None
        self._turns: dict[str, Turn] = {}
        self._use_producer(env.index)

    def _use_producer(self, index: int) -> None:
        """Switches to the options of one producer."""
        self.close()
        self._index = index
        self._options = self._producer.merged(index)
        self._journal = QueueJournal(self._env.staging, self._options.queue, self._env.shared)
        self._queues = StandingQueues(self._options, self._journal)

    def renew(self, lease: Lease) -> Lease | None:
        return lease if self._clock.now() < self._check_lease(lease).deadline else None

    def holds(self, lease: Lease) -> bool:
        lease = self._check_lease(lease)
        return self._retry_until_done(lambda: self._holds(lease))

    def _holds(self, lease: Lease) -> bool:
        if self._clock.now() >= lease.deadline or self._journal.is_over(lease.generation):
            return False
        name = self._queue_of(lease)
        return name is None or self._connection.depth(name) is not None

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        lease = self._check_lease(lease)
        report = self._retry_until_done(lambda: self._settle(lease, settlement))
        return report + SettleReport(errors=about_set_aside(lease))

    def _settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        if settlement.expected is None:
            # Recorded first, then read: of this and the source's opening, one sees the other.
            self._journal.note_closed(lease.generation, self._clock.now())
        name = self._queue_of(lease)
        if name is None:
            return unheld_report(self._journal, lease, settlement)
        with self._queues.holding.claim(self._connection, name, CLAIM_TIMEOUT) as queue:
            if queue is None:
                raise ProducerUnavailable(
                    f"the holding queue {name!r} is claimed by another process for more than"
                    f" {CLAIM_TIMEOUT:.0f} s"
                )
            outbox = self._outbox(lease)
            work = LeaseSettlement(self._journal, lease, settlement, outbox)
            return work.run(queue, self._clock.now())

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        lease = self._check_lease(lease)
        chosen = list(entries)
        try:
            return self._retry_until_done(lambda: self._settle_now(lease, chosen))
        except BaseException:  # also on KeyboardInterrupt and SystemExit; re-raised
            self._turns.pop(lease.generation, None)  # a retry may publish duplicates
            raise

    def _settle_now(self, lease: Lease, chosen: list[Entry]) -> SettleReport:
        if not chosen:
            return SettleReport()
        if not self._holds(lease):
            return SettleReport(
                lapsed=len(chosen), undone=frozenset(entry.message_id for entry in chosen)
            )
        done = self._journal.log_of(lease.generation).now()
        outbox = self._outbox(lease, lambda: self._turn_of(lease.generation))
        actions: Counter[Action] = Counter()
        carried_out: dict[str, Action] = {}
        for entry in chosen:
            key, action = entry.message_id, entry.verdict.action
            if key in done:
                actions[done[key]] += 1
                continue
            if action is not Action.ACK:
                message = held_of(entry)
                if message is None:
                    outbox.guard.refuse(key, "its payload was not kept")
                    continue
                action = outbox.carry_out(message, entry.verdict)
            carried_out[key] = action
            actions[action] += 1
        for key in outbox.finish().keys() & carried_out.keys():  # it stays in its bundle
            actions[carried_out.pop(key)] -= 1
        self._journal.log_of(lease.generation).note_now(carried_out)
        guard = outbox.guard
        report = report_of(+actions, failed=len(guard.refused), errors=guard.errors())
        return replace(report, undone=frozenset(guard.refused))

    def _outbox(self, lease: Lease, turn: Callable[[], Turn] | None = None) -> Outbox:
        return Outbox(
            self._connection, self._queues, self._clock, lease.generation, lease.deadline, turn
        )

    def _turn_of(self, generation: str) -> Turn:
        """Returns the turn in which this custodian settles messages immediately."""
        if generation not in self._turns:
            self._turns[generation] = self._journal.note_turn(generation, whole=False)
        return self._turns[generation]

    def _retry_until_done(self, work: Callable[[], _T]) -> _T:
        """Calls ``work``, and retries after a lost connection: the journal records progress.

        :raises ProducerUnavailable: If the broker is unavailable, or loses every connection, for
            ``reconnect_timeout``; or if it repeatedly loses connections that last longer.
        """
        attempts, left = Attempts.of(self._options, self._clock), _MAX_SETTLE_TRIES
        while True:
            began = self._clock.monotonic()
            try:
                return work()
            except ProducerUnavailable as error:
                if self._opened is not None:
                    log.warning("%s: settling goes on with another connection.", error)
                self.close()
                self._turns.clear()
                if self._clock.monotonic() - began > self._options.reconnect_timeout:
                    attempts.worked()
                    left -= 1
                if not left or isinstance(error, Blocked):
                    raise
                attempts.again(error)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # -- lookups -------------------------------------------------------------------------------

    def _queue_of(self, lease: Lease) -> str | None:
        """Returns the generation's holding queue; ``None`` if it never opened one."""
        name = lease.state.get("holding_queue") or self._journal.opened(lease.generation)
        return self._queues.names.own_held(name) if name else None

    def _check_lease(self, lease: Lease) -> Lease:
        index = int(lease.state.get("index", self._env.index))
        if index != self._index and self._producer.merge_options is not None:
            self._use_producer(index)
        return check_lease(lease, self._options.kind, self._options.queue)

    @property
    def _connection(self) -> ConnectionThread:
        if self._opened is None or self._opened.lost is not None:
            self.close()
            self._opened = ConnectionThread.to(address_for(self._options, self._env))
        return self._opened
