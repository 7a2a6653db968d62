"""Takes over holding queues whose generation is settled, or whose lease has lapsed.

All that such a generation held and that needs handling goes back into the source queue, marked, for
the run that sweeps and for others.  Each bundle is acknowledged behind the confirms of its
messages, so a sweep that is killed is completed by the next.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.verdicts import RELEASE, Action
from airflow_broadway.core.errors import BroadwayError
from airflow_broadway.core.text import many
from airflow_broadway.producers.kit.generation_log import Settled
from airflow_broadway.producers.rabbitmq import bundle as bundles
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueue
from airflow_broadway.producers.rabbitmq.broker.standing_queues import StandingQueues
from airflow_broadway.producers.rabbitmq.bundle import BundleError, Header
from airflow_broadway.producers.rabbitmq.settle.outbox import Outbox
from airflow_broadway.producers.rabbitmq.settle.settlement import COUNT_TIMEOUT, covers

log = logging.getLogger(__name__)


def sweep(connection: ConnectionThread, queues: StandingQueues, env: ProducerEnv) -> None:
    """Looks at every holding queue.  Never in the way of a run: errors are logged."""
    try:
        for name, depth in queues.holding.present(connection):
            if not depth or env.stopping():
                continue
            with queues.holding.claim(connection, name) as queue:
                owner = None if queue is None else _lapsed_owner(queue, queues, env)
                if queue is not None and owner is not None:
                    _take_over(connection, queues, env, queue, owner)
        queues.journal.forget(env.clock.now())
    except (BroadwayError, OSError, ValueError) as error:
        log.warning("Holding queues of dead generations could not be swept: %s", error)


def _lapsed_owner(queue: HoldingQueue, queues: StandingQueues, env: ProducerEnv) -> Header | None:
    """Returns whose the queue is, if that generation is settled, or its lease has lapsed."""
    try:
        owner = queue.owner()
    except BundleError as error:
        text, code = "The holding queue %r is not used: %s.", {"code": "bundle_unreadable"}
        log.error(text, queue.name, error, extra=code)
        return None
    if owner is None or owner.until <= env.clock.now().timestamp():
        return owner
    return None if queues.journal.settled(owner.generation) is None else owner


def _take_over(
    connection: ConnectionThread,
    queues: StandingQueues,
    env: ProducerEnv,
    queue: HoldingQueue,
    owner: Header,
) -> None:
    journal, generation = queues.journal, owner.generation
    queue.fence(generation)
    journal.note_swept(generation)
    now = env.clock.now()
    outbox = Outbox(connection, queues, env.clock, generation, now, holding_queue=queue.name)
    released, unreadable = 0, []
    known: dict[str, tuple[Settled | None, Mapping[str, Action]]] = {}
    for delivered in queue.bundles(queue.count(None, 0.0), COUNT_TIMEOUT):
        try:
            header, messages = bundles.unpack(delivered.body)
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
        settled, done = known[header.generation]
        if not covers(settled, header):
            for message in messages:
                if message.message_id not in done:
                    outbox.carry_out(message._replace(redelivered=True), RELEASE)
                    released += 1
        queue.getter.keep(delivered.tag)
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
