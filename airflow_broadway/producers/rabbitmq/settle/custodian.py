"""The half that settles, from any process: knows the lease alone."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from airflow_broadway.core.custody.protocol import Entry, Lease, Settlement
from airflow_broadway.core.custody.report import ComingAgain, SettleReport
from airflow_broadway.core.custody.verdicts import Action
from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.checks import check_lease
from airflow_broadway.producers.kit.reports import about_set_aside, report_of
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.backoff import Attempts, Backoff, keep_trying
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.amqp.errors import Blocked
from airflow_broadway.producers.rabbitmq.broker import queue_calls
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.settle.outbox import Outbox, Turn, held_of, staged
from airflow_broadway.producers.rabbitmq.settle.reading import unreported
from airflow_broadway.producers.rabbitmq.settle.settlement import BUNDLES_TIMEOUT, LeaseSettlement

if TYPE_CHECKING:
    from airflow_broadway.core.custody.producer import ProducerEnv
    from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

__all__ = ["RabbitCustodian"]

log = logging.getLogger(__name__)

#: A lease that ends so soon is not relied on: bundles are read and compared.  A part of the whole
#: lease, and seconds at most.
_LEASE_MARGIN, _MAX_LEASE_MARGIN_SECONDS = 0.05, 60.0
#: How often a settlement is begun whose connections break only after a while.
_MAX_SETTLE_TRIES = 3

_Done = TypeVar("_Done")


class RabbitCustodian:
    """Settles the generations of one queue."""

    def __init__(self, options: RabbitMQOptions, env: ProducerEnv) -> None:
        self._options = options
        self._env = env
        self._clock = env.clock
        self._journal = QueueJournal(env.staging, options.queue)
        self._opened: ConnectionThread | None = None
        self._topology = Topology(options, self._journal)
        self._turns: dict[str, Turn] = {}
        self._unreachable = False

    def renew(self, lease: Lease) -> Lease | None:
        return lease if self._clock.now() < self._checked(lease).deadline else None

    def holds(self, lease: Lease) -> bool:
        lease = self._checked(lease)
        return self._until_done(lambda: self._holds(lease))

    def _holds(self, lease: Lease) -> bool:
        if self._clock.now() >= lease.deadline:
            return False
        if self._journal.settled(lease.generation) is not None:
            return False
        if not self._was_declared(lease):
            return True
        return queue_calls.depth(self._connection, self._queue_of(lease)) is not None

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        lease = self._checked(lease)
        report = self._until_done(lambda: self._settle_once(lease, settlement))
        return report + SettleReport(errors=about_set_aside(lease))

    def _settle_once(self, lease: Lease, settlement: Settlement) -> SettleReport:
        noted = self._journal.settled(lease.generation)
        if noted is not None:
            if noted.details["bundles"] is None:  # killed before the queue was deleted
                self._topology.leases.delete(self._connection, self._queue_of(lease))
            return noted.report
        report = self._settle(lease, settlement)
        # Of a run that received nothing there is nothing to note, nor would a sweep remove it.
        if self._was_declared(lease) and self._journal.settled(lease.generation) is None:
            self._journal.note_settled(lease.generation, report, ())
        return report

    def _settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        expected = settlement.expected
        depth = None
        if self._was_declared(lease):
            depth = queue_calls.depth(self._connection, self._queue_of(lease))
        work = self._settlement_of(lease)
        held = self._is_held(lease)
        if depth is None:
            noted = self._journal.settled(lease.generation)
            if noted is not None:  # another has settled it just now, and deleted the queue
                return noted.report
            at_once = self._journal.now(lease.generation)
            early = unreported(at_once, settlement)
            early = replace(early, again=ComingAgain.of(at_once, whole=not expected))
            if expected is None:
                return self._without_manifest(lease) + early
            if not expected:
                return early
            if not held:
                return SettleReport(lapsed=max(0, expected - early.total)) + early
            return work.without_bundles(settlement)
        if held and work.known(settlement, self._depth_once_back(lease, depth)):
            report = work.by_staging(settlement)
            if report is not None:
                return report
            held = False
        return work.by_bundles(settlement, held=held)

    def _without_manifest(self, lease: Lease) -> SettleReport:
        """The report of a generation that published no manifest, and has no lease queue."""
        declared = lease.state.get("declared") or self._journal.opened(lease.generation)
        if not declared or self._clock.now() >= lease.deadline:
            return SettleReport()
        # It was not us: we delete a lease queue once it is settled, which is noted, or has lapsed.
        handed = int(lease.state.get("messages", 0)) - len(self._journal.now(lease.generation))
        held = many(handed, "message") if handed > 0 else "all of it"
        error = (
            f"the lease queue {self._queue_of(lease)!r} was deleted before this run had published"
            f" what it received: what it held is lost ({held}); lease queues are deleted by this"
            " package alone"
        )
        log.error("%s", error, extra={"code": "lease_queue_deleted"})
        return SettleReport(lapsed=max(0, handed), errors=(error,))

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        lease = self._checked(lease)
        given = list(entries)
        try:
            return self._until_done(lambda: self._settle_now(lease, given))
        except BaseException:  # a kill too; raised again
            self._turns.pop(lease.generation, None)  # who tries again may publish twice
            raise

    def _settle_now(self, lease: Lease, given: list[Entry]) -> SettleReport:
        if not given:
            return SettleReport()
        if not self._holds(lease):
            return SettleReport(
                lapsed=len(given), undone=frozenset(entry.message_id for entry in given)
            )
        done = self._journal.now(lease.generation)
        outbox = Outbox(
            self._connection,
            self._topology,
            lease,
            self._clock,
            lambda: self._turn_of(lease.generation),
            self._journal.limit(),
            returns_refused=False,
        )
        actions: Counter[Action] = Counter()
        news: dict[str, Action] = {}
        for entry in given:
            key, action = entry.message_id, entry.verdict.action
            if key in done:
                actions[done[key]] += 1
                continue
            if action is not Action.ACK:
                if not staged(entry):
                    outbox.guard.refuse(key, "its payload was not kept")
                    continue
                outbox.carry_out(held_of(entry), entry.verdict)
            news[key] = action
            actions[action] += 1
        for key in outbox.finish():  # it stays with the others
            actions[news.pop(key)] -= 1
        if news:
            self._journal.note_now(lease.generation, news)
        guard = outbox.guard
        report = report_of(+actions, failed=len(guard.refused), errors=guard.errors())
        return replace(report, undone=frozenset(guard.refused))

    def _turn_of(self, generation: str) -> Turn:
        """The turn in which this custodian settles messages at once."""
        if generation not in self._turns:
            self._turns[generation] = self._journal.note_turn(generation, whole=False)
        return self._turns[generation]

    def _until_done(self, work: Callable[[], _Done]) -> _Done:
        """Do it, and again if the connection breaks on the way: what was done is noted.

        :raises ProducerUnavailable: If the broker cannot be reached for ``reconnect_timeout``, or
            breaks each connection for so long, or again and again those that hold for longer.
        """
        attempts, left = self._attempts(), _MAX_SETTLE_TRIES
        while True:
            began = self._clock.monotonic()
            try:
                return work()
            except ProducerUnavailable as error:
                self.close()
                self._turns.clear()
                if self._clock.monotonic() - began > self._options.reconnect_timeout:
                    attempts.worked()
                    left -= 1
                if self._unreachable or not left or isinstance(error, Blocked):
                    raise
                attempts.again(error)
                log.warning("%s: settling goes on with another connection.", error)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _attempts(self) -> Attempts:
        options = self._options
        return Attempts(Backoff.of(options), options.reconnect_timeout, self._clock)

    # -- what is known -------------------------------------------------------------------------

    def _queue_of(self, lease: Lease) -> str:
        queues = self._topology.queues
        return queues.own_lease(
            self._journal.opened(lease.generation)
            or lease.state.get("lease_queue")
            or queues.lease(lease.generation)
        )

    def _is_held(self, lease: Lease) -> bool:
        margin = min(_LEASE_MARGIN * lease.seconds, _MAX_LEASE_MARGIN_SECONDS)
        return (lease.deadline - self._clock.now()).total_seconds() > margin

    def _was_declared(self, lease: Lease) -> bool:
        # The lease as it was before the first receive cannot tell; the journal can.
        return (
            bool(lease.state.get("declared") or self._journal.opened(lease.generation))
            or not self._journal.files.durable
        )

    def _depth_once_back(self, lease: Lease, depth: int) -> int:
        """The depth, once bundles are back that a process held which has just died."""
        end = time.monotonic() + BUNDLES_TIMEOUT
        wanted = int(lease.state.get("bundles", 0))
        while depth < wanted and time.monotonic() < end:
            time.sleep(0.1)
            depth = queue_calls.depth(self._connection, self._queue_of(lease)) or 0
        return depth

    def _checked(self, lease: Lease) -> Lease:
        return check_lease(lease, self._options.kind, self._options.queue)

    def _settlement_of(self, lease: Lease) -> LeaseSettlement:
        return LeaseSettlement(
            self._connection,
            self._topology,
            self._journal,
            lease,
            self._queue_of(lease),
            self._clock,
            lambda: self._journal.note_turn(lease.generation, whole=True),
        )

    @property
    def _connection(self) -> ConnectionThread:
        if self._opened is not None and self._opened.lost is not None:
            self.close()
        if self._opened is None:
            address = address_for(self._options, self._env)
            self._unreachable = True
            self._opened = keep_trying(lambda: ConnectionThread.to(address), self._attempts())
            self._unreachable = False
        return self._opened
