"""``airflow-broadway rabbitmq``: whether a pipeline's messages are safe at its broker."""

from __future__ import annotations

import argparse
from typing import Any

from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.adapters.dag_folders import add_dag_folders
from airflow_broadway.cli.output import CommandError, say, say_json
from airflow_broadway.cli.replay import read_reference
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.model.run_info import RunInfo
from airflow_broadway.core.reference import load_ref, make_ref
from airflow_broadway.core.text import table
from airflow_broadway.producers.rabbitmq import RabbitMQProducer
from airflow_broadway.producers.rabbitmq.amqp.address import Address, address_for
from airflow_broadway.producers.rabbitmq.amqp.connection_thread import ConnectionThread
from airflow_broadway.producers.rabbitmq.broker import queue_calls
from airflow_broadway.producers.rabbitmq.broker.checks import (
    ERROR,
    NOTE,
    Finding,
    check_queues,
    refuse_version,
    roles_of,
)
from airflow_broadway.producers.rabbitmq.options import RabbitMQOptions

__all__ = ["check"]


def check(given: argparse.Namespace) -> int:
    """Look at a producer's queues and policies; 1 if there is an error or a warning."""
    declared = _producer(given)
    shown, grave = [], 0
    for producer in declared.shards():
        address = address_for(producer, ProducerEnv(connections=AirflowConnections()))
        version, depths, findings = _look(producer, address)
        grave += sum(each.level != NOTE for each in findings)
        shown.append(
            {
                "broker": address.shown,
                "version": version,
                "virtual_host": address.virtual_host,
                "queues": [
                    {"queue": name, "for": role, _holds(role): depth}
                    for name, role, depth in depths
                ],
                "findings": [each._asdict() for each in findings],
            }
        )
        if not given.json:
            _print(address, version, depths, findings)
    if given.json:
        say_json(shown[0] if declared.merge_options is None else shown)
    return int(grave > 0)


def _print(address: Address, version: str, depths: _Depths, findings: list[Finding]) -> None:
    say(f"RabbitMQ {version} at {address.shown}, virtual host {address.virtual_host!r}.", "")
    rows = [
        (name, role, None if depth is None else f"{depth} {_holds(role)}")
        for name, role, depth in depths
    ]
    say(*table(("queue", "for", "holds"), rows), "")
    order = sorted(findings, key=lambda each: (each.level != ERROR, each.level == NOTE))
    say(*(f"{each.level}: {each.shown}" for each in order))
    if all(each.level == NOTE for each in findings):
        say("No policy harms this run's messages." if not findings else "No harm was found.")


def _holds(role: str) -> str:
    """What the broker counts in a queue: how many messages a bundle has, only it says itself."""
    return {"returns": "bundles", "spares": "names"}.get(role, "messages")


_Depths = list[tuple[str, str, int | None]]


def _look(producer: RabbitMQOptions, address: Address) -> tuple[str, _Depths, list[Finding]]:
    """The broker's version, the depth of each queue (``None``: not there yet), and the findings.

    :raises CommandError: If the source queue is not there.
    """
    connection = ConnectionThread.to(address)
    try:
        version = connection.version
        findings = []
        try:
            refuse_version(version, producer, address.shown)
        except ProducerError as error:
            findings.append(Finding(ERROR, "", str(error)))
        # Lease queues have names of their own; any stands for all.
        depths = [
            (role.queue, role.name, queue_calls.depth(connection, role.queue))
            for role in roles_of(producer)
            if role.name != "lease"
        ]
    finally:
        connection.close()
    there = depths[0][2] is not None
    if not there and producer.declare is None:
        raise CommandError(
            f"RabbitMQ at {address.shown} has no queue {producer.queue!r} in the virtual host"
            f" {address.virtual_host!r}: create it, or correct the name"
        )
    findings += check_queues(producer, address, version=version, there=there)
    return version, depths, findings


def _producer(given: argparse.Namespace) -> RabbitMQProducer:
    """The producer that the arguments name.

    :raises CommandError: If they name none of RabbitMQ.
    """
    more: dict[str, Any] = {"conn_id": given.conn_id} if given.conn_id else {}
    if given.queue is not None:
        return RabbitMQProducer(queue=given.queue, dead_letter=given.dead_letter, **more)
    add_dag_folders()
    pipeline = load_ref(make_ref(read_reference(given.pipeline)), RunInfo())
    producer = pipeline.producer
    if not isinstance(producer, RabbitMQProducer):
        raise CommandError(
            f"the producer of {given.pipeline} is {type(producer).__name__}, not RabbitMQProducer"
        )
    if "{{" in producer.queue:
        raise CommandError(
            f"the queue of {given.pipeline} is the template {producer.queue!r}: give --queue"
        )
    return producer
