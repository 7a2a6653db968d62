"""pytest fixtures, found by pytest itself where this package is installed."""

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


class CrashTesting(Protocol):
    """What ``broadway_crash_test`` is."""

    def __call__(
        self,
        pipeline: type[Pipeline] | str,
        messages: Iterable[bytes | str],
        *,
        sink: Callable[..., Any] | str | None = None,
        share: float = 0.0,
        **options: Any,
    ) -> Sums:
        """Put a pipeline to the test, and return the sums.

        :param messages: The bodies.
        :param sink: Called with a case's folder, returns the rows that the sink holds.
        :param share: Of the cases at the package's own calls, 0 to 1; those at the callbacks, and
            at calls that these make, are all run.
        :param options: Others of :class:`airflow_broadway.testing.crashes.users.CrashTest`.
        :raises AssertionError: If a case failed; with the report.
        :raises airflow_broadway.testing.crashes.users.CrashTestError: If it cannot be run.
        """
        ...


@pytest.fixture
def broadway_crash_test() -> CrashTesting:
    """Kills a pipeline at every point, in a process of its own; see ``docs/testing.md``."""

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

        bodies = [each.encode() if isinstance(each, str) else each for each in messages]
        sums = crash_test_apart(pipeline, bodies, sink=sink, share=share, **options)
        if not sums.good:
            lines = report(sums, lambda case: f"broadway_crash_test(..., only=[{str(case)!r}])")
            raise AssertionError("\n".join(["the crash test failed", *lines]))
        return sums

    return run
