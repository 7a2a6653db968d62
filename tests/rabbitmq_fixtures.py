"""Fixtures of RabbitMQ tests: one server for the session, started on first use."""

from __future__ import annotations

import os
from functools import cache

import pytest

from tests.rabbitmq_server import RabbitServer, find_server, given_url
from tests.server_process import at_end, session_folder

__all__ = ["in_ci", "session_server", "skip_without_own_server", "wanted_server"]


def in_ci() -> bool:
    """Returns whether a missing broker is a failure."""
    return os.environ.get("CI") == "true" or os.environ.get("AIRFLOW_BROADWAY_CI") == "1"


@cache
def session_server() -> RabbitServer:
    """Starts the server of this process, once; it ends with the session."""
    server = RabbitServer.start(session_folder("rabbitmq"))
    at_end.callback(server.stop)
    return server


def wanted_server() -> RabbitServer:
    """Returns the server; skips the test where it is not installed, except in CI."""
    if given_url() is None and find_server() is None and not in_ci():
        pytest.skip("no RabbitMQ here; see docker/compose.yaml")
    return session_server()


def skip_without_own_server() -> None:
    """Skips a test that needs a server to kill, except in CI."""
    if find_server() is None or given_url() is not None:
        if in_ci() and given_url() is None:
            pytest.fail("RabbitMQ is not installed")
        pytest.skip("no RabbitMQ of the tests' own to kill")
