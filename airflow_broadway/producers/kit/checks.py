"""What all brokers check: whose a lease is, and whether a server is spoken to in the clear."""

from __future__ import annotations

import functools
import ipaddress
import logging
from urllib.parse import urlsplit

from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.errors import ProducerError
from airflow_broadway.core.masking import redacted

__all__ = ["check_lease", "is_loopback", "warn_of_plain_http"]

log = logging.getLogger(__name__)


def check_lease(lease: Lease, kind: str, queue: str) -> Lease:
    """The lease, if it is of this queue.

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
    """Warn, once per process, that others on the network can read what is sent to ``http://``.

    :param what: What can be read, in words.
    """
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        log.warning("%s go unencrypted to %s: use https://.", what, redacted(url))
