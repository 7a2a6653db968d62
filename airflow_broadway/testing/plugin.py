"""pytest fixtures, registered by an entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from airflow_broadway.core import telemetry
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.testing.clock import ManualClock
from airflow_broadway.testing.driver import PipelineDriver
from airflow_broadway.testing.dummy import RecordingAcknowledger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from airflow_broadway.testing.crashes import Sums


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


class CrashTesting(Protocol):
    """The type of ``broadway_crash_test``."""

    def __call__(
        self,
        pipeline: type[Pipeline] | str,
        messages: Iterable[bytes | str],
        *,
        sink: Callable[..., Any] | str | None = None,
        share: float = 0.0,
        **options: Any,
    ) -> Sums:
        """Runs the crash test of a pipeline; returns the sums.

        :param messages: The bodies.
        :param sink: Called with a case's folder; returns the rows of the sink.
        :param share: The share of the cases at the package's own calls, 0 to 1; all cases at the
            callbacks, and at the calls that these make, are run.
        :param options: Other options of
            :class:`airflow_broadway.testing.crashes.users.CrashTest`.
        :raises AssertionError: If a case failed; with the report.
        :raises airflow_broadway.testing.crashes.users.CrashTestError: If it cannot be run.
        """
        ...


@pytest.fixture
def broadway_crash_test() -> CrashTesting:
    """Returns a function that crash-tests a pipeline; see ``docs/testing.md``."""

    def run(
        pipeline: type[Pipeline] | str,
        messages: Iterable[bytes | str],
        *,
        sink: Callable[..., Any] | str | None = None,
        share: float = 0.0,
        **options: Any,
    ) -> Sums:
        from airflow_broadway.testing.crashes.apart import crash_test_apart
        from airflow_broadway.testing.crashes.report import report

        bodies = [body.encode() if isinstance(body, str) else body for body in messages]
        sums = crash_test_apart(pipeline, bodies, sink=sink, share=share, **options)
        if not sums.good:
            lines = report(sums, lambda case: f"broadway_crash_test(..., only=[{str(case)!r}])")
            raise AssertionError("\n".join(["the crash test failed", *lines]))
        return sums

    return run
