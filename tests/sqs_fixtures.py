"""What SQS tests share: one server for the whole session, started when first wanted."""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.rabbitmq_fixtures import in_ci
from tests.sqs_server import SqsServer, given_url

__all__ = ["session_sqs", "wanted_sqs"]


@cache
def session_sqs() -> SqsServer:
    """The server of this process; it ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="broadway-sqs-"))
    server = SqsServer.start(folder)

    def end() -> None:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return server


def wanted_sqs() -> SqsServer:
    """The server, or a skipped test where moto is not installed; in CI it must be there."""
    if given_url() is None and importlib.util.find_spec("moto") is None and not in_ci():
        pytest.skip("no SQS here: moto's server is not installed")
    return session_sqs()
