"""Deletes the lease queues of dead generations, and in time what was noted of them.

A queue that looks empty may not be: bundles whose lease lapsed and that the returns queue has not
taken yet show in none of AMQP's counts.  So a lease queue is deleted only when the last bundle in
it can have lapsed, nobody can publish to it any more, it looks empty, the returns queue is there,
and either the management API, which does count them, says 0, or an hour has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from airflow_broadway.core.errors import BroadwayError, ProducerError
from airflow_broadway.core.text import many
from airflow_broadway.producers.rabbitmq.amqp.address import Address
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker import queue_calls
from airflow_broadway.producers.rabbitmq.broker.management import Management, Unseen
from airflow_broadway.producers.rabbitmq.broker.topology import Topology
from airflow_broadway.producers.rabbitmq.journal import Due, QueueJournal

__all__ = ["counting", "due_at", "sweep"]

log = logging.getLogger(__name__)

#: Seconds for the management API's counts to be those after the lapse; it takes them every five.
_COUNT_DELAY = 60.0
#: Seconds for the broker to move what lapsed: its dead-letter worker tries again every 3 minutes.
_LAPSE_GRACE = 3600.0
#: Seconds for which a journal outlives its queue at least; longer while bundles lie in the returns
#: queue.
_JOURNAL_RETENTION = 7 * 86400.0
#: Seconds until what could not be deleted is looked at again.
_NEXT_LOOK_INTERVAL = 86400.0


def due_at(deadline: float, seconds: float) -> tuple[float, float]:
    """From when on a lease queue holds nothing that can still lapse, and nothing that hides.

    A generation takes nothing after its deadline, and what it took until then lapses within
    ``seconds`` more.
    """
    due = deadline + seconds + _COUNT_DELAY
    return due, due + _LAPSE_GRACE


def sweep(
    connection: ConnectionThread,
    topology: Topology,
    journal: QueueJournal,
    now: float,
    counted: Callable[[str], int | None],
) -> None:
    """Look at all lease queues that are due.  Never in the way of a run: errors are logged.

    :param counted: How many messages a queue holds, those too that lapse; ``None`` if unknown.
    """
    try:
        for due in journal.due(now):
            if due.gone:
                _forget(connection, topology, journal, due, now, counted)
                continue
            try:
                queue = topology.queues.own_lease(due.queue)
            except ProducerError as error:
                log.warning("A file about a lease queue is removed: %s.", error)
                journal.forget(due)
                continue
            if due.unused and journal.is_used(queue):
                journal.drop(due)  # its generation has noted when it is due
                continue
            if now < due.sure and counted(queue) != 0:
                journal.put_off(due, due.sure, gone=False)
                continue
            lost = False
            try:
                gone = _look_at(connection, topology, queue)
            except BroadwayError as error:
                log.warning("The lease queue %r could not be looked after: %s", due.queue, error)
                gone, lost = False, connection.lost is not None
            if due.unused and (gone or now > due.sure + _JOURNAL_RETENTION):
                if not gone:
                    log.warning(
                        "The lease queue %r never came into use, and could not be deleted for a"
                        " week: it is not looked after any more.  Delete it by hand.",
                        due.queue,
                    )
                journal.forget(due)
                continue
            journal.put_off(
                due, now + (_JOURNAL_RETENTION if gone else _NEXT_LOOK_INTERVAL), gone=gone
            )
            if lost:
                return
    except (BroadwayError, OSError, ValueError) as error:
        log.warning("Lease queues of dead generations could not be looked after: %s", error)


def _forget(
    connection: ConnectionThread,
    topology: Topology,
    journal: QueueJournal,
    due: Due,
    now: float,
    counted: Callable[[str], int | None],
) -> None:
    """Remove what was noted of a generation, unless a returned bundle may still speak of it.

    Such a bundle asks its journal what is settled, and in staged custody finds its messages there.
    One that a run has in its hands shows in the management API's counts alone: without them the
    returns queue must have been empty twice, a day apart.
    """
    returns = topology.queues.returns
    held = counted(returns)
    if held is None:
        held = queue_calls.depth(connection, returns) or 0
        if not held and not due.empty:
            journal.put_off(due, now + _NEXT_LOOK_INTERVAL, gone=True, empty=True)
            return
    if held:
        journal.put_off(due, now + _NEXT_LOOK_INTERVAL, gone=True)
    else:
        journal.forget(due)


def counting(address: Address) -> Callable[[str], int | None]:
    """Ask the management API how many messages a queue holds, until it does not answer."""
    asked: list[Management | None] = []

    def count(queue: str) -> int | None:
        try:
            if not asked:
                asked.append(Management(address))
            api = asked[0]
            found = api.queue(queue) if api is not None else None
        except Unseen:
            asked[:] = [None]
            return None
        value = (found or {}).get("messages")
        return value if isinstance(value, int) else None

    return count


def _look_at(connection: ConnectionThread, topology: Topology, queue: str) -> bool:
    """Whether a lease queue is gone now."""
    depth = queue_calls.depth(connection, queue)
    if depth:
        log.warning(
            "The lease queue %r still holds %s, long after its lease has lapsed: look whether %r"
            " takes messages.",
            queue,
            many(depth, "bundle"),
            topology.queues.returns,
        )
        return False
    if depth is not None:
        # Whoever wakes so late publishes to it no more: what is to be deleted is emptied first.
        topology.leases.fence(connection, queue)
        if not topology.leases.is_empty(connection, queue):
            log.warning("The lease queue %r does not say that it is empty: it is kept.", queue)
            return False
        topology.standing.ensure_returns(connection)
        topology.leases.delete(connection, queue)
        log.info("Deleted the lease queue %r of a dead generation.", queue)
    return True
