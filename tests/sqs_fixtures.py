"""Fixtures of SQS tests: one server for the session, started on first use."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from tests.rabbitmq_fixtures import in_ci
from tests.server_process import at_end, session_folder
from tests.sqs_server import SqsServer, given_url

__all__ = ["session_sqs", "wanted_sqs"]


@cache
def session_sqs() -> SqsServer:
    """Starts the server of this process, once; it ends with the session."""
    server = SqsServer.start(session_folder("sqs"))
    at_end.callback(server.stop)
    return server


def wanted_sqs() -> SqsServer:
    """Returns the server; skips the test where moto is not installed, except in CI."""
    if given_url() is None and importlib.util.find_spec("moto") is None and not in_ci():
        pytest.skip("no SQS here: moto's server is not installed")
    return session_sqs()
