"""Addresses of servers: which are this machine's, and which are spoken to in the clear."""

from __future__ import annotations

import functools
import ipaddress
import logging
from urllib.parse import urlsplit

from airflow_broadway.core.masking import redacted

__all__ = ["is_loopback", "warn_of_plain_http"]

log = logging.getLogger(__name__)


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
