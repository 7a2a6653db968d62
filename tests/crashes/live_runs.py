"""A live run that precedes the runs of a case."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from airflow_broadway import RetryPolicy
from airflow_broadway.core.model.run_source import RunSource
from airflow_broadway.testing.crashes.interceptor import Boundary, Interceptor
from airflow_broadway.testing.crashes.scheduler import use_deterministic_ids
from airflow_broadway.testing.crashes.sink import call_in_fork
from airflow_broadway.testing.crashes.subject import Embedded, Subject
from airflow_broadway.testing.crashes.tasks import Attempt, execute

#: Prefixes of runs that only settle and clean up.
SETTLING = ("after", "aging", "last")


class LiveBefore(Embedded):
    """An embedded queue whose messages a live run has already handled."""

    def overrides(self) -> Mapping[str, Any]:
        result = super().overrides()
        # One attempt: otherwise messages that fail in the live run return to the queue.
        once = replace(result["producer"], retry=RetryPolicy(max_attempts=1))
        return {**result, "producer": once}

    def execute(self, attempt: Attempt) -> Any:
        source = (
            RunSource() if attempt.run_id.startswith(SETTLING) else self._source(attempt.run_id)
        )
        pipeline = self.pipeline(**self.overrides())
        return execute(pipeline, self.staging, attempt, hold_failed=self.hold_failed, source=source)

    @abstractmethod
    def _source(self, run_id: str) -> RunSource:
        """Returns the source of a run that handles messages."""


def live_run(
    subject: Subject,
    name: str,
    overrides: Callable[[], Mapping[str, Any]],
    boundaries: Sequence[Boundary] = (),
) -> None:
    """Executes all tasks of a live run in a process without faults.

    :param overrides: The pipeline's options.
    :param boundaries: The boundaries to install.
    """

    def run() -> None:
        use_deterministic_ids(name, salt=subject.salt)
        interceptor = Interceptor(f"{name}/process/1")
        for boundary in boundaries:
            boundary.install(interceptor)
        pipeline = subject.pipeline(**overrides())
        processes = [f"process!{index}" for index in range(pipeline.producer.concurrency)]
        tasks = [*processes, *(f"batch.{batcher}" for batcher in pipeline.batchers), "ack"]
        returned: dict[str, Any] = {}
        for task in tasks:
            attempt = Attempt(
                run_id=name,
                task=task,
                try_number=1,
                tasks=tasks,
                failed=(),
                returned=dict(returned),
                runs={name: SimpleNamespace(over=False)},
                interceptor=interceptor,
                driver=None,
            )
            returned[task] = execute(pipeline, subject.staging, attempt, hold_failed=0.0)

    call_in_fork(run, subject.work, subject.folder / "log.txt", name)
