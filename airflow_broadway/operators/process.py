"""Receives messages, runs ``handle_message`` on each, and stages the results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException

from airflow_broadway.core.text import pluralize
from airflow_broadway.operators.pull import PullOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_broadway.adapters.host import Host
    from airflow_broadway.core.pipeline import Pipeline

__all__ = ["BroadwayProcessorOperator"]


class BroadwayProcessorOperator(PullOperator):
    """Receives messages within a budget, runs ``handle_message`` on each, and stages the results.

    Returns a reference to the published manifest, never payloads: XCom lives in the metadata
    database.  Never skips: an empty queue gives an empty manifest.  Map it over ``producer_index``
    for several producers.

    :param pipeline: A :class:`Broadway` subclass, an instance, or its import path such as
        ``"shop.orders:Orders"``. (templated)
    :param producer_index: The index of this producer, from 0; by default it is the only one, and
        receives all messages.
    :param max_messages: Stop after this many messages of this task; ``None``: no limit. (templated)
    :param max_bytes: Stop once payloads of this many bytes were received. (templated)
    :param max_seconds: Stop receiving after this many seconds, even if messages remain. (templated)
    :param wait_seconds: How long to wait for the first message. (templated)
    :param idle_seconds: Stop after this long without a message. (templated)
    :param source: The source of the messages: ``"live"``, ``"archive"``, ``"dead_letters"``,
        ``"log"`` or ``"run"``.  By default a run of type backfill reads its interval from the
        archive, or from the broker's log, and any other run reads the queue. (templated)
    :param staging: URI of the staging root; by default ``[broadway] staging``. (templated)

    Params of the run with the names of the five budgets, where not null, override them; so does
    ``source``, with ``interval_start`` and ``interval_end``, or ``source_run``.

    :raises OptionsError: While the Dag is parsed, if a budget breaks its rule.
    """

    def _writing_batchers(self, pipeline: Pipeline) -> Collection[str]:
        return ()

    def _pull(self, host: Host, work: Mapping[str, Any]) -> dict[str, Any]:
        from airflow_broadway.runs.tasks import ProcessTask

        self._task = ProcessTask(**work)
        reference, trouble, timed_out = self._task.run()
        self._report(host, work, reference)
        if timed_out:
            # A retry would void the published messages: later tasks get the reference all the same.
            host.ti.xcom_push(key="return_value", value=reference)
            raise AirflowFailException(
                f"The execution_timeout of {self.execution_timeout} passed while callbacks were"
                f" running.  Completed messages are published and go on; the rest is released"
            )
        if trouble:  # all is settled: a retry would only receive more
            raise AirflowFailException(f"All messages are settled or released, but {trouble}")
        ended = ended_sensor(self.task_id, host.context)
        if ended and reference["received"] and work["pipeline"].batchers:
            # Cleared alone: without this check the run would succeed with its messages held.
            host.ti.xcom_push(key="return_value", value=reference)
            raise AirflowFailException(
                f"{pluralize(reference['received'], 'message')} are received and held, and"
                f" {ended!r} of this run, which would settle them, has ended: clear it, and the"
                " tasks between, too.  Otherwise the next run releases these messages"
            )
        return reference


def ended_sensor(task_id: str, context: Context) -> str | None:
    """Returns the id of the ack sensor that watches this task, if it has ended in this run."""
    from airflow_broadway.sensors.ack import BroadwayAckSensor
    from airflow_broadway.triggers.ack import FINISHED

    ti, dag = context["ti"], context.get("dag")
    for task in dag.tasks if dag is not None else ():
        if isinstance(task, BroadwayAckSensor) and task_id in task.watched(context):
            states = ti.get_task_states(
                dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=[task.task_id]
            )
            if states.get(ti.run_id, {}).get(task.task_id) in FINISHED:
                return str(task.task_id)
    return None
