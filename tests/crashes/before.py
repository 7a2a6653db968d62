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
from airflow_broadway.testing.crashes.scheduler import number_ids
from airflow_broadway.testing.crashes.sink import forked
from airflow_broadway.testing.crashes.subject import Embedded, Subject
from airflow_broadway.testing.crashes.tasks import Attempt, execute

#: Runs that look after what the others leave, and handle nothing.
SETTLING = ("after", "look", "last")


class LiveBefore(Embedded):
    """The embedded queue, whose messages a live run has handled before."""

    def overrides(self) -> Mapping[str, Any]:
        result = super().overrides()
        # What fails in the live run is dead: else it would come again in the live queue.
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
    """Makes a live run from its first task to its last, in an undisturbed process.

    :param overrides: The options with which it runs.
    :param boundaries: Those of the subject's that it is to have, too.
    """

    def run() -> None:
        number_ids(name, salt=subject.salt)
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

    forked(run, subject.work, subject.folder / "log.txt", name)
