"""The error when received messages are not secured in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.errors import ProducerUnavailable
from airflow_broadway.producers.rabbitmq.receive.source import RabbitSource
from airflow_broadway.testing.clock import ManualClock


def confirm_timeout(*, blocked: bool = False) -> float:
    """Returns the time to wait for confirms after the connection's timeout of 30 s."""
    source: Any = object.__new__(RabbitSource)
    source._address = SimpleNamespace(timeout=30.0)
    source._connection = SimpleNamespace(blocked=blocked)
    source._clock = ManualClock()
    source._clock.advance(31.0)
    return float(source._confirm_timeout(1.0))


def test_missing_publisher_confirms_are_named():
    with pytest.raises(ProducerUnavailable, match="RabbitMQ does not confirm"):
        confirm_timeout()


def test_memory_alarm_is_waited_out():
    assert confirm_timeout(blocked=True) == 1.0
