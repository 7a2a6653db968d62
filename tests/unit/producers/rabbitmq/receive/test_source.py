"""Which side is named when what was taken is not secured in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.receive.source import RabbitSource
from airflow_broadway.testing.clock import ManualClock


def waited(*, blocked: bool = False) -> float:
    """Wait for confirms that have been waited for as long as a connection may take: 30 s."""
    source: Any = object.__new__(RabbitSource)
    source._address = SimpleNamespace(timeout=30.0)
    source._connection = SimpleNamespace(blocked=blocked)
    source._clock = ManualClock()
    source._clock.advance(31.0)
    return float(source._confirm_timeout(1.0))


def test_missing_publisher_confirms_are_named():
    with pytest.raises(ProducerUnavailable, match="RabbitMQ does not confirm"):
        waited()


def test_memory_alarm_is_waited_out():
    assert waited(blocked=True) == 1.0
