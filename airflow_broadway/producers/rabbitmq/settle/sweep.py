"""Takes over holding queues whose generation is settled, or whose lease has lapsed.

All that such a generation held and that needs handling goes back into the source queue, marked, for
the run that sweeps and for others.  Each bundle is acknowledged behind the confirms of its
messages, so a sweep that is killed is completed by the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from airflow_broadway.core.clock import Clock
from airflow_broadway.core.custody.verdicts import RELEASE, Action
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.generation_log import Settled
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueue
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.bundle import BundleError, Header
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.settle.outbox import Outbox
from airflow_broadway.producers.rabbitmq.settle.settlement import COUNT_TIMEOUT, covers

log = logging.getLogger(__name__)


class Sweep:
    """The sweep that a run begins with.

    :param stopping: Whether the run is to stop.
    """

    def __init__(
        self,
        connection: ConnectionThread,
        topology: Topology,
        journal: QueueJournal,
        clock: Clock,
        stopping: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._topology = topology
        self._journal = journal
        self._clock = clock
        self._stopping = stopping

    def run(self) -> None:
        """Look at every holding queue.  Never in the way of a run: errors are logged."""
        holding = self._topology.holding
        try:
            for name, depth in holding.present(self._connection):
                if self._stopping():
                    return
                if not depth:
                    continue
                with holding.claim(self._connection, name) as queue:
                    if queue is not None:
                        self._look_at(queue)
            self._journal.forget(self._clock.now())
        except (BroadwayError, OSError, ValueError) as error:
            log.warning("Holding queues of dead generations could not be swept: %s", error)

    def _look_at(self, queue: HoldingQueue) -> None:
        try:
            owner = queue.owner()
        except BundleError as error:
            log.error(
                "The holding queue %r is not used: %s.",
                queue.name,
                error,
                extra={"code": "bundle_unreadable"},
            )
            return
        if owner is None:
            return
        lapsed = owner.until <= self._clock.now().timestamp()
        if lapsed or self._journal.settled(owner.generation) is not None:
            self._take_over(queue, owner)

    def _take_over(self, queue: HoldingQueue, owner: Header) -> None:
        journal, generation = self._journal, owner.generation
        queue.fence(generation)
        journal.note_swept(generation)
        outbox = self._outbox(queue, owner)
        released, unreadable = 0, []
        known: dict[str, tuple[Settled | None, Mapping[str, Action]]] = {}
        for tag, body in queue.bundles(queue.count(None, 0.0), COUNT_TIMEOUT):
            try:
                header, messages = bundles.unpack(body)
            except BundleError as error:
                unreadable.append(str(error))
                continue
            if header.bundle in outbox.remainders:
                continue
            if header.generation not in known:
                known[header.generation] = (
                    journal.settled(header.generation),
                    journal.now(header.generation),
                )
            settled, now = known[header.generation]
            if not covers(settled, header):
                for message in messages:
                    if message.message_id not in now:
                        outbox.carry_out(message._replace(redelivered=True), RELEASE)
                        released += 1
            queue.getter.keep(tag)
        released -= len(outbox.finish())
        queue.free()
        for text in (*outbox.guard.errors(), *dict.fromkeys(unreadable)):
            log.error("In the holding queue %r: %s.", queue.name, text)
        if released:
            log.warning(
                "Generation %s has ended and left %s in %r: released into the source queue.",
                generation,
                many(released, "message"),
                queue.name,
            )

    def _outbox(self, queue: HoldingQueue, owner: Header) -> Outbox:
        journal = self._journal
        return Outbox(
            self._connection,
            self._topology,
            owner.generation,
            owner.until,
            self._clock,
            lambda: journal.note_turn(owner.generation, whole=True),
            journal.limit(),
            holding_queue=queue.name,
        )
