"""Checks the queues of a producer, and reports their depth."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.producers.rabbitmq.amqp.address import address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker import queue_calls
from airflow_broadway.producers.rabbitmq.broker.checks import check_queues, refuse_version
from airflow_broadway.producers.rabbitmq.broker.holding_queues import HoldingQueues
from airflow_broadway.producers.rabbitmq.broker.names import LADDER, QueueNames
from airflow_broadway.producers.rabbitmq.bundle import BundleError
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions


def check(options: RabbitMQOptions, env: ProducerEnv) -> list[Finding]:
    """Checks the broker's version, the source queue, and the policies of every queue of a run."""
    address = address_for(options, env)
    with closing(ConnectionThread.to(address)) as connection:
        version = connection.version
        there = queue_calls.depth(connection, options.queue) is not None
        held = [name for name, _ in HoldingQueues(QueueNames(options.queue)).present(connection)]
    findings = []
    try:
        refuse_version(version, address.shown)
    except ProducerError as error:
        findings.append(Finding("error", str(error)))
    if there or options.declare is not None:
        found = check_queues(options, address, version=version, held=held, there=there)
        findings += [Finding(each.level, each.shown) for each in found]
    else:
        text = (
            f"RabbitMQ at {address.shown} has no queue {options.queue!r} in the virtual host"
            f" {address.virtual_host!r}: create it, or correct the name"
        )
        findings.append(Finding("error", text))
    return findings


def depth(all_options: Iterable[RabbitMQOptions], env: ProducerEnv) -> QueueDepth:
    """Counts the queues together.

    A bundle whose lease has lapsed counts as one ready message: the next run releases the up to 500
    messages in it.
    """
    counts = [_depth(options, env) for options in all_options]
    return QueueDepth(
        ready=sum(each.ready for each in counts),
        delayed=sum(each.delayed for each in counts),
        leased=0,
        dead=sum(each.dead for each in counts),
        oldest_age=None,
    )


def _depth(options: RabbitMQOptions, env: ProducerEnv) -> QueueDepth:
    names = QueueNames(options.queue)
    connection = ConnectionThread.to(address_for(options, env))
    try:

        def count(name: str) -> int:
            return queue_calls.depth(connection, name) or 0

        place: Any = options.dead_letter
        dead = place if isinstance(place, str) else names.dead
        lapsed = _lapsed(connection, HoldingQueues(names), env.clock.now().timestamp())
        return QueueDepth(
            ready=count(names.source) + lapsed,
            delayed=sum(count(names.delay(step)) for step in LADDER),
            leased=0,
            dead=count(dead),
            oldest_age=None,
        )
    finally:
        connection.close()


def _lapsed(connection: ConnectionThread, holding: HoldingQueues, now: float) -> int:
    """Counts the bundles that the next run takes over."""
    total = 0
    for name, ready in holding.present(connection):
        if not ready:
            continue
        with holding.claim(connection, name) as queue:
            try:
                owner = None if queue is None else queue.owner()
            except BundleError:
                continue
            if owner is not None and owner.until <= now:
                total += ready - (owner.count == 0)
    return total
