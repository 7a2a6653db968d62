"""What tests at a real broker share."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_broadway.producers.rabbitmq.broker import queue_calls
from tests.rabbitmq_fixtures import wanted_server
from tests.rabbitmq_place import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A queue of the test's own at RabbitMQ, not declared yet."""
    # Nobody kills this broker: the first lease queue of a test may be used at once.
    monkeypatch.setattr(queue_calls, "_RELIABLE_AGE", 0.0)
    return Place(wanted_server(), tmp_path)
