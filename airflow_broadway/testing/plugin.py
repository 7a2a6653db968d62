"""pytest fixtures, registered by an entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from airflow_broadway.core import telemetry
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.testing.clock import ManualClock
from airflow_broadway.testing.driver import PipelineDriver
from airflow_broadway.testing.dummy import RecordingAcknowledger

if TYPE_CHECKING:
    from airflow_broadway.testing.crashes.campaign import Totals


@pytest.fixture
def broadway_clock() -> ManualClock:
    """Returns a clock that only moves when advanced."""
    return ManualClock()


@pytest.fixture
def broadway_acks() -> RecordingAcknowledger:
    """Returns an acknowledger that records its calls."""
    return RecordingAcknowledger()


@pytest.fixture
def broadway_driver(
    broadway_clock: ManualClock,
) -> Callable[[Pipeline | type[Pipeline]], PipelineDriver]:
    """Returns a function that builds a driver of a pipeline on ``broadway_clock``."""
    return lambda pipeline: PipelineDriver(pipeline, clock=broadway_clock)


@pytest.fixture
def broadway_events() -> Iterator[list[str]]:
    """Yields the names of the telemetry events emitted during the test, in order."""
    events: list[str] = []
    handler = telemetry.attach(lambda event, measurements, metadata: events.append(event))
    yield events
    telemetry.detach(handler)


@pytest.fixture
def broadway_crash_test() -> Callable[..., Totals]:
    """Returns :func:`airflow_broadway.testing.crashes.users.crash_test`.

    See ``docs/testing.md``.
    """
    from airflow_broadway.testing.crashes.users import crash_test

    return crash_test
