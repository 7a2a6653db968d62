"""Who is named when what was taken is not secured in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_broadway.core.errors import ProducerUnavailable, StagingError
from airflow_broadway.producers.rabbitmq.amqp.confirm_window import ConfirmWindow
from airflow_broadway.producers.rabbitmq.receive.ending import confirm_timeout
from airflow_broadway.testing.clock import ManualClock


def waited(*windows: ConfirmWindow, blocked: bool = False) -> float:
    """Wait for channels that have been waited for as long as a connection may take: 30 s."""
    connection: Any = SimpleNamespace(address=SimpleNamespace(timeout=30.0), blocked=blocked)
    channels: Any = [SimpleNamespace(window=window) for window in windows]
    clock = ManualClock()
    clock.advance(31.0)
    return confirm_timeout(connection, channels, 1.0, clock)


@pytest.fixture
def stored() -> ConfirmWindow:
    """A channel whose bundle is published, and not confirmed."""
    window = ConfirmWindow()
    window.publish("b1")
    return window


@pytest.fixture
def unstored() -> ConfirmWindow:
    """A channel whose bundle is not in the staging folder yet."""
    window = ConfirmWindow()
    window.reserve("b1")
    return window


def test_a_broker_that_does_not_confirm_is_named(stored: ConfirmWindow) -> None:
    stored.reserve("b2")

    with pytest.raises(ProducerUnavailable, match="RabbitMQ does not confirm"):
        waited(ConfirmWindow(), stored)


def test_a_staging_folder_that_is_slow_is_named_and_not_the_broker(unstored: ConfirmWindow) -> None:
    unstored.publish("b2")

    with pytest.raises(StagingError, match=r"the staging folder takes too long .*\(30 s\)"):
        waited(unstored, ConfirmWindow())


def test_a_broker_that_is_short_of_memory_is_waited_for(stored: ConfirmWindow) -> None:
    assert waited(stored, blocked=True) == 1.0
