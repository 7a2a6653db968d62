"""Fixtures of Pub/Sub tests: one emulator for the session, started on first use.

A test with the fixture ``pubsub`` runs on the stub, and on the emulator where it is installed.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.pubsub_server import Emulator, StubServer, find_emulator
from tests.server_process import at_end, session_folder

__all__ = ["pubsub", "pubsub_emulator", "pubsub_stub", "session_emulator", "wanted_emulator"]


@cache
def session_emulator() -> Emulator:
    """Starts the emulator of this process, once; it ends with the session."""
    server = Emulator(session_folder("pubsub")).run()
    at_end.callback(server.stop)
    return server


def wanted_emulator() -> Emulator:
    """Returns the emulator; skips the test where it is not installed."""
    if find_emulator() is None:
        pytest.skip("no Pub/Sub emulator here: gcloud components install pubsub-emulator")
    return session_emulator()


@pytest.fixture(params=[Emulator.kind, StubServer.kind])
def pubsub(request):
    """The emulator and the stub, one after the other."""
    if request.param == Emulator.kind:
        yield wanted_emulator()
    else:
        with StubServer() as server:
            yield server


@pytest.fixture
def pubsub_emulator():
    """Google's emulator."""
    return wanted_emulator()


@pytest.fixture
def pubsub_stub():
    """A stub per test, with the answers of the test."""
    with StubServer() as server:
        yield server
