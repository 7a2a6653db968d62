"""Checks the queues of a producer, and reports their depth."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker.checks import check_queues, check_version
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueues
from airflow_broadway.producers.rabbitmq.broker.names import LADDER, QueueNames
from airflow_broadway.producers.rabbitmq.bundle import BundleError
from airflow_broadway.producers.rabbitmq.journal import QueueJournal
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions


def check(options: RabbitMQOptions, env: ProducerEnv) -> list[Finding]:
    """Checks the broker's version, the source queue, and the policies of every queue of a run."""
    address = address_for(options, env)
    with closing(ConnectionThread.to(address)) as connection:
        findings = check_version(connection)
        exists = connection.depth(options.queue) is not None
        if exists or options.declare is not None:
            return findings + check_queues(connection, options, exists=exists)
    text = (
        f"RabbitMQ at {address.shown} has no queue {options.queue!r} in the virtual host"
        f" {address.virtual_host!r}: create it, or correct the name"
    )
    return [*findings, Finding("error", text)]


def depth(all_options: Iterable[RabbitMQOptions], env: ProducerEnv) -> QueueDepth:
    """Counts the queues together.

    A bundle that the next run takes over counts as one ready message: it releases the up to 500
    messages in it.
    """
    ready = delayed = dead = 0
    for options in all_options:
        names = QueueNames(options.queue)
        place: Any = options.dead_letter
        with closing(ConnectionThread.to(address_for(options, env))) as connection:
            ready += connection.depth(names.source) or 0
            ready += _lapsed(connection, options, env)
            delayed += sum(connection.depth(names.delay(step)) or 0 for step in LADDER)
            dead += connection.depth(place if isinstance(place, str) else names.dead) or 0
    return QueueDepth(ready=ready, delayed=delayed, leased=0, dead=dead, oldest_age=None)


def _lapsed(connection: ConnectionThread, options: RabbitMQOptions, env: ProducerEnv) -> int:
    """Counts the bundles that the next run takes over."""
    holding = HoldingQueues(QueueNames(options.queue))
    journal = QueueJournal(env.staging, options.queue, env.shared)
    total, now = 0, env.clock.now().timestamp()
    for name, ready in holding.present(connection):
        if not ready:
            continue
        with holding.claim(connection, name) as queue:
            try:
                owner = None if queue is None else queue.owner()
            except BundleError:
                continue
            if owner is not None and (owner.until <= now or journal.is_over(owner.generation)):
                total += ready - (owner.count == 0)
    return total
