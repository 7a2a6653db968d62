"""pytest fixtures, found by pytest itself where this package is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from airflow_broadway.core import telemetry
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.testing.clock import ManualClock
from airflow_broadway.testing.driver import PipelineDriver
from airflow_broadway.testing.dummy import RecordingAcknowledger


@pytest.fixture
def broadway_clock() -> ManualClock:
    """A clock that stands still until it is moved."""
    return ManualClock()


@pytest.fixture
def broadway_acks() -> RecordingAcknowledger:
    """An acknowledger that remembers its calls."""
    return RecordingAcknowledger()


@pytest.fixture
def broadway_driver(
    broadway_clock: ManualClock,
) -> Callable[[Pipeline | type[Pipeline]], PipelineDriver]:
    """Makes drivers on ``broadway_clock``; call it with a pipeline."""
    return lambda pipeline: PipelineDriver(pipeline, clock=broadway_clock)


@pytest.fixture
def broadway_events() -> Iterator[list[str]]:
    """The names of the telemetry events emitted during the test, in order."""
    seen: list[str] = []
    handler = telemetry.attach(lambda event, measurements, metadata: seen.append(event))
    yield seen
    telemetry.detach(handler)
