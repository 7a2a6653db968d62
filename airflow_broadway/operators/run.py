"""Runs a pipeline whose batchers are all Python in one task, with real custody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_broadway.adapters import task_docs
from airflow_broadway.adapters.outlets import check_no_outlets
from airflow_broadway.adapters.parsing import declared
from airflow_broadway.core.custody.run_summary import check_fail_when
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.pipeline import Pipeline, check_engines
from airflow_broadway.operators.pull import PullOperator

if TYPE_CHECKING:
    from airflow_broadway.adapters.host import Host
    from airflow_broadway.core.model.run_source import RunSource

__all__ = ["BroadwayRunOperator"]


def check_unstaged(pipeline: Pipeline) -> None:
    """Refuses a pipeline with an archive, a dead-letter table or outlets of batchers: this
    operator stages no messages.

    :raises OptionsError: If the pipeline has one of them.
    """
    for name, use in (("archive", "be archived"), ("dead_letter_table", "become its rows")):
        if getattr(pipeline, name) is not None:
            raise OptionsError(
                name,
                f"None with BroadwayRunOperator, which stages nothing that could {use}; with"
                " task_group() the pipeline can have one",
                getattr(pipeline, name),
            )
    check_no_outlets(pipeline)


class BroadwayRunOperator(PullOperator):
    """Runs a pipeline whose batchers are all ``engine="python"`` in this one task.

    Nothing is staged: messages are handled, batched and settled at their broker as their outcomes
    arrive.  For low latency, use it with ``schedule="@continuous"`` and ``wait_seconds``, so that
    an idle queue does not fill the metadata database with empty runs.

    The arguments are those of :class:`BroadwayProcessorOperator`, and:

    :param fail_when: As for :class:`BroadwayAckSensor`.
    :raises PipelineError: If a batcher runs on Spark: while the Dag is parsed if the pipeline is
        passed as a class or an instance, else when the task runs.
    """

    _task_docs = task_docs.RUN
    _task_kind = "run"

    _keeps_report = True

    def __init__(self, *, fail_when: str | float = "all", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fail_when = check_fail_when(f"{self.task_id}.fail_when", fail_when)

    @classmethod
    def _check_engine(cls, ref: Mapping[str, Any]) -> None:
        super()._check_engine(ref)
        pipeline = declared(ref)
        if pipeline is not None:
            check_engines(pipeline)
            check_unstaged(pipeline)

    def _check_pipeline(self, pipeline: Pipeline) -> None:
        check_unstaged(pipeline)

    def _check_source(self, source: RunSource) -> None:
        if not source.asks_broker:
            raise AirflowFailException(
                f"the source {source.kind!r} needs a run whose messages are staged: build the Dag"
                " with the pipeline's task_group(), or dag() without run; nothing was received"
            )

    def _pull(self, host: Host, work: Mapping[str, Any]) -> dict[str, Any]:
        from airflow_broadway.runs.tasks import UnstagedTask

        self._task = UnstagedTask(**work, fail_when=self.fail_when)
        reference, trouble, _ = self._task.run()
        self._report(host, work, reference)
        if trouble:  # all is settled: a retry would only receive more
            raise AirflowFailException(
                f"All messages are settled or released, but {trouble}.  {reference['summary']}"
            )
        return reference
