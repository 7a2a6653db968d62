"""Checks of leases, connection types, a broker's delivery limits, and plain HTTP."""

from __future__ import annotations

import functools
import ipaddress
import logging
from urllib.parse import urlsplit

from airflow_broadway.core.custody.findings import Finding
from airflow_broadway.core.custody.producer import Producer, ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import ConnectionMissing, ProducerError
from airflow_broadway.core.masking import redacted
from airflow_broadway.core.model.connections import Connection
from airflow_broadway.core.text import pluralize

log = logging.getLogger(__name__)


def check_lease(lease: Lease, kind: str, queue: str) -> Lease:
    """Returns the lease after checking that it belongs to this queue.

    :param kind: The producer's kind.
    :param queue: The queue's name, as recorded in ``lease.state["queue"]``.
    :raises ProducerError: If it belongs to another queue: source and custodian need the same
        options.
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
    """Returns the connection of a broker; ``None`` for the client's default credentials.

    :param conn_id: The producer's option; ``None`` for the client's default credentials.
    :param default: The id of the default connection, which may be missing.
    :param types: The accepted connection types; the first is named in errors.
    :param service: The broker's name, for error messages.
    :raises ConnectionMissing: If another connection is missing, or the type is not accepted.
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
    """Warns of a broker policy that dead-letters a message after too few deliveries.

    :param limit: The policy's maximum number of deliveries; 0: no limit.
    :param least: The minimum that is enough without retries: a release counts as a delivery.
    :param policy: A description of the policy.
    :param counted: A description of its limit.
    :param setting: The name of its setting.
    """
    retries = "retry" in (producer.on_success, producer.on_failure)
    attempts = producer.retry.max_attempts if retries else 0
    if not limit or limit >= max(least, attempts):
        return []
    early = f", before its {pluralize(attempts, 'attempt')} are used up" if limit < attempts else ""
    text = (
        f"{policy} makes a message a dead letter after {counted}{early}: what a dead or stopped run"
        f" releases counts as one too; set {setting} to {max(least, attempts)} or more"
    )
    return [Finding("warning", text)]


def is_loopback(host: str) -> bool:
    """Returns whether a host is the loopback interface."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@functools.cache
def warn_of_plain_http(url: str, data: str) -> None:
    """Warns, once per process, that data sent to an ``http://`` URL is unencrypted.

    :param data: A description of the data.
    """
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        log.warning("%s go unencrypted to %s: use https://.", data, redacted(url))
