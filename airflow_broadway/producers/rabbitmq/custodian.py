"""The half that settles, from any process: knows the lease alone."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.custody import (
    Action,
    Entry,
    Lease,
    QueueDepth,
    Settlement,
    SettleReport,
)
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.journal import Journal
from airflow_broadway.producers.rabbitmq.link import Link
from airflow_broadway.producers.rabbitmq.queues import LADDER
from airflow_broadway.producers.rabbitmq.settling import Settling, held_of, report_of
from airflow_broadway.producers.rabbitmq.source import is_open_here
from airflow_broadway.producers.rabbitmq.topology import Topology

if TYPE_CHECKING:
    from airflow_broadway.core.producer import ProducerEnv
    from airflow_broadway.producers.rabbitmq.producer import RabbitMQProducer

__all__ = ["RabbitCustodian", "depth"]

log = logging.getLogger(__name__)

#: The part of a lease, and the seconds at most, before its end in which bundles are read and
#: compared.
_MARGIN, _MARGIN_SECONDS = 0.05, 60.0
#: Seconds to wait for bundles that another process held until just now.
_PATIENCE = 3.0


class RabbitCustodian:
    """Settles the generations of one queue."""

    def __init__(self, producer: RabbitMQProducer, env: ProducerEnv) -> None:
        self._producer = producer
        self._env = env
        self._clock = env.clock
        self._journal = Journal(env.staging, producer.queue)
        self._opened: Link | None = None
        self._shape: Topology | None = None

    def renew(self, lease: Lease) -> Lease | None:
        return lease if self._clock.now() < self._checked(lease).deadline else None

    def holds(self, lease: Lease) -> bool:
        lease = self._checked(lease)
        if self._clock.now() >= lease.deadline:
            return False
        if self._journal.settled(lease.generation) is not None:
            return False
        if not self._was_declared(lease):
            return True
        return self._topology.depth(self._link, self._queue(lease)) is not None

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        lease = self._checked(lease)
        noted = self._journal.settled(lease.generation)
        if noted is not None:
            if noted["bundles"] is None:  # killed before the queue was deleted
                self._topology.delete(self._link, self._queue(lease))
            return SettleReport.from_json(noted["report"])
        report = self._settle(lease, settlement)
        if self._journal.settled(lease.generation) is None:
            self._journal.note_settled(lease.generation, report.to_json(), ())
        return report

    def _settle(self, lease: Lease, settlement: Settlement) -> SettleReport:
        expected = settlement.expected
        depth = None
        if self._was_declared(lease):
            depth = self._topology.depth(self._link, self._queue(lease))
        settling = self._settling(lease, whole=True)
        held = self._held(lease)
        if depth is None:
            if expected is None:
                return self._without_manifest(lease)
            if not expected:
                return SettleReport()
            if not held:
                return SettleReport(lapsed=expected)
            return settling.without_bundles(settlement)
        if held and settling.known(settlement, self._patient(lease, depth), held):
            report = settling.by_staging(settlement)
            if report is not None:
                return report
            held = False
        crashed = expected is None and not is_open_here(lease.generation)
        return settling.by_bundles(settlement, held=held, crashed=crashed)

    def _without_manifest(self, lease: Lease) -> SettleReport:
        """The report of a generation that published no manifest, and has no lease queue."""
        noted = self._journal.settled(lease.generation)
        if noted is not None:  # another has settled it just now
            return SettleReport.from_json(noted["report"])
        declared = lease.state.get("declared") or self._journal.opened(lease.generation)
        if not declared or self._clock.now() >= lease.deadline:
            return SettleReport()
        # Not by us: who deletes it has noted that it is settled, or waits until it has lapsed.
        handed = int(lease.state.get("messages", 0)) - len(self._journal.now(lease.generation))
        error = (
            f"the lease queue {self._queue(lease)!r} was deleted before this run had published what"
            f" it received: {max(0, handed) or 'all'} messages that it held are lost; lease queues"
            " are deleted by this package alone"
        )
        log.error("%s", error, extra={"code": "lease_queue_deleted"})
        return SettleReport(lapsed=max(0, handed), errors=(error,))

    def settle_now(self, lease: Lease, entries: Iterable[Entry]) -> SettleReport:
        lease = self._checked(lease)
        given = list(entries)
        if not given:
            return SettleReport()
        if not self.holds(lease):
            return SettleReport(lapsed=len(given))
        done = self._journal.now(lease.generation)
        settling = self._settling(lease, whole=False)
        actions: Counter[Action] = Counter()
        news: dict[str, str] = {}
        missing: list[str] = []
        for entry in given:
            if entry.message_id in done:
                actions[Action(done[entry.message_id])] += 1
                continue
            action = entry.verdict.action
            if action is not Action.ACK:
                if entry.payload is None:
                    missing.append(entry.message_id)
                    continue
                settling.carry_out(held_of(entry), entry.verdict)
            news[entry.message_id] = action.value
            actions[action] += 1
        refused = settling.flush()
        for key in refused:
            actions[Action(news.pop(key))] -= 1
        if news:
            self._journal.note_now(lease.generation, news)
        errors = tuple(sorted({f"RabbitMQ refused: {reason}" for reason in refused.values()}))
        if missing:
            errors += ("a message cannot be settled at once: its payload was not kept",)
        return report_of(+actions, failed=len(refused) + len(missing), errors=errors)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    # -- what is known -------------------------------------------------------------------------

    def _queue(self, lease: Lease) -> str:
        return (
            self._journal.opened(lease.generation)
            or lease.state.get("lease_queue")
            or self._topology.queues.lease(lease.generation)
        )

    def _held(self, lease: Lease) -> bool:
        margin = min(_MARGIN * lease.seconds, _MARGIN_SECONDS)
        return (lease.deadline - self._clock.now()).total_seconds() > margin

    def _was_declared(self, lease: Lease) -> bool:
        # The lease as it was before the first receive cannot tell; the journal can.
        return (
            bool(lease.state.get("declared") or self._journal.opened(lease.generation))
            or not self._journal.durable
        )

    def _patient(self, lease: Lease, depth: int) -> int:
        """The depth, once bundles are back that a process held which has just died."""
        end = time.monotonic() + _PATIENCE
        wanted = int(lease.state.get("bundles", 0))
        while depth < wanted and time.monotonic() < end:
            time.sleep(0.1)
            depth = self._topology.depth(self._link, self._queue(lease)) or 0
        return depth

    def _checked(self, lease: Lease) -> Lease:
        here = self._producer.queue
        if lease.kind != self._producer.kind or lease.state.get("queue", here) != here:
            raise ProducerError(
                f"the lease of generation {lease.generation!r} is of {lease.kind} queue"
                f" {lease.state.get('queue')!r}, and this producer's is {self._producer.kind} queue"
                f" {here!r}: give both halves of the run the same options"
            )
        return lease

    def _settling(self, lease: Lease, *, whole: bool) -> Settling:
        return Settling(
            self._link,
            self._topology,
            self._journal,
            lease,
            self._queue(lease),
            self._clock,
            whole=whole,
        )

    @property
    def _topology(self) -> Topology:
        if self._shape is None:
            self._shape = Topology(self._producer)
        return self._shape

    @property
    def _link(self) -> Link:
        if self._opened is not None and self._opened.lost is not None:
            self.close()
        if self._opened is None:
            self._opened = Link(self._producer.address(self._env))
        return self._opened


def depth(producer: RabbitMQProducer, env: ProducerEnv) -> QueueDepth:
    """How full the queue is; returned bundles count by what is in their queue."""
    topology = Topology(producer)
    link = Link(producer.address(env))
    try:
        queues = topology.queues

        def count(name: str) -> int:
            return topology.depth(link, name) or 0

        place: Any = producer.dead_letter
        dead = place if isinstance(place, str) else queues.dead
        return QueueDepth(
            ready=count(queues.source) + count(queues.returns),
            delayed=sum(count(queues.delay(step)) for step in LADDER),
            leased=0,
            dead=count(dead),
            oldest_age=None,
        )
    finally:
        link.close()
