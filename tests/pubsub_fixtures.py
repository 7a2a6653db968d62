"""What Pub/Sub tests share: one emulator for the whole session, started when first wanted.

A test with the fixture ``pubsub`` runs once on each peer that is there: the emulator, and the
rules of the tests' own, which are always there.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.pubsub_server import Emulator, StubServer, find_emulator

__all__ = ["pubsub", "pubsub_emulator", "pubsub_stub", "session_emulator", "wanted_emulator"]


@cache
def session_emulator() -> Emulator:
    """The emulator of this process; it ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="broadway-pubsub-"))
    server = Emulator(folder).run()

    def end() -> None:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return server


def wanted_emulator() -> Emulator:
    """The emulator, or a skipped test where there is none: the stub has the same test then."""
    if find_emulator() is None:
        pytest.skip("no Pub/Sub emulator here: gcloud components install pubsub-emulator")
    return session_emulator()


@pytest.fixture(params=[Emulator.kind, StubServer.kind])
def pubsub(request):
    """Each peer, one after another."""
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
    """A server of a test's own, which does as the test says."""
    with StubServer() as server:
        yield server
