"""Checks whose a lease is, the type of a connection, a broker's own limits, and plain HTTP."""

from __future__ import annotations

import functools
import ipaddress
import logging
from urllib.parse import urlsplit

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Connection, Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import ConnectionMissing, ProducerError
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.text import many

log = logging.getLogger(__name__)


def check_lease(lease: Lease, kind: str, queue: str) -> Lease:
    """Returns the lease, if it is of this queue.

    :param kind: The producer's.
    :param queue: As the source noted it in ``lease.state["queue"]``.
    :raises ProducerError: If it is another's: both halves of a run must have the same options.
    """
    if lease.kind != kind or lease.state.get("queue", queue) != queue:
        raise ProducerError(
            f"the lease of generation {lease.generation!r} is of {lease.kind} queue"
            f" {lease.state.get('queue')!r}, and this producer's is {kind} queue {queue!r}: give"
            " both halves of the run the same options"
        )
    return lease


def connection_of(
    env: ProducerEnv, conn_id: str | None, *, default: str, types: tuple[str, ...], service: str
) -> Connection | None:
    """Returns the connection of a broker; ``None``: its client looks for credentials by itself.

    :param conn_id: As the producer has it; ``None``: it looks by itself.
    :param default: The id whose connection may be missing.
    :param types: What such a connection is of; the first is the one to name.
    :param service: The broker's name, for people.
    :raises ConnectionMissing: If another one is missing, or it is of another type.
    """
    if conn_id is None:
        return None
    try:
        connection = env.connections.get(conn_id)
    except ConnectionMissing:
        if conn_id != default:
            raise
        log.info("There is no connection %r: the client looks for credentials itself.", conn_id)
        return None
    if connection.conn_type not in (*types, "generic", ""):
        raise ConnectionMissing(
            f"the connection {conn_id!r} is of type {connection.conn_type!r}; {service} needs one"
            f" of type {types[0]!r}"
        )
    return connection


def findings_of_limit(
    producer: Producer, limit: int, least: int, *, policy: str, counted: str, setting: str
) -> list[Finding]:
    """Warns of a broker that makes a message a dead letter itself, after few deliveries.

    :param limit: The deliveries after which it does; 0: never.
    :param least: What is enough where no attempts are retried: a release counts as a delivery.
    :param policy: The policy, for people; ``counted``: its limit; ``setting``: its name.
    """
    retries = "retry" in (producer.on_success, producer.on_failure)
    attempts = producer.retry.max_attempts if retries else 0
    if not limit or limit >= max(least, attempts):
        return []
    early = f", before its {many(attempts, 'attempt')} are used up" if limit < attempts else ""
    text = (
        f"{policy} makes a message a dead letter after {counted}{early}: what a dead or stopped run"
        f" releases counts as one too; set {setting} to {max(least, attempts)} or more"
    )
    return [Finding("warning", text)]


def is_loopback(host: str) -> bool:
    """Whether what is sent to a host stays on this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@functools.cache
def warn_of_plain_http(url: str, what: str) -> None:
    """Warns, once per process, that others on the network can read what is sent to ``http://``.

    :param what: What can be read, in words.
    """
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        log.warning("%s go unencrypted to %s: use https://.", what, redacted(url))
