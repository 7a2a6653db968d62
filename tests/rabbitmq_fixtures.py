"""What broker tests share: one server for the whole session, started when first wanted."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.rabbitmq_server import RabbitServer, find_server, given_url

__all__ = ["in_ci", "session_server", "skip_without_own_server", "wanted_server"]


def in_ci() -> bool:
    """Whether a missing broker is a failure."""
    return os.environ.get("CI") == "true" or os.environ.get("AIRFLOW_BROADWAY_CI") == "1"


@cache
def session_server() -> RabbitServer:
    """The server of this process; it ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="broadway-rabbitmq-"))
    server = RabbitServer.start(folder)

    def end() -> None:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return server


def wanted_server() -> RabbitServer:
    """The server, or a skipped test where there is none; in CI it must be there."""
    if given_url() is None and find_server() is None and not in_ci():
        pytest.skip("no RabbitMQ here; see docker/compose.yaml")
    return session_server()


def skip_without_own_server() -> None:
    """Skip a test that wants a server that it may kill; in CI there must be one."""
    if find_server() is None or given_url() is not None:
        if in_ci() and given_url() is None:
            pytest.fail("RabbitMQ is not installed")
        pytest.skip("no RabbitMQ of the tests' own to kill")
