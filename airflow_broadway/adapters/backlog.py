"""Reads a backlog with Airflow's connections, its configuration, and the runs of a Dag."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from airflow_broadway.adapters.staging import env_outside_run, open_store
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.model.backlog import Backlog
from airflow_broadway.runs.backlog.crossings import Runs
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.reports import report_backlog, unreported

log = logging.getLogger(__name__)

T = TypeVar("T")


def look_at(
    queues: WatchedQueues, staging: str | None, *, dag_id: str | None = None, by: str = ""
) -> QueueDepth | None:
    """Reads the depth of the queues; blocks, and opens new connections.

    :param staging: URI of the staging root, where producers keep notes between runs.
    :param dag_id: The pipeline's Dag, under which the depth is reported; ``None``: not reported.
    :param by: The trigger or sensor that reads it, for the report.
    :raises BroadwayError: If a connection is missing, or a broker cannot be reached.
    """
    env = env_outside_run(queues.pipeline, staging)
    at = env.clock.now()
    depth = queues.depth(env)
    if dag_id is not None:
        try:
            store = open_store(staging)
        except Exception as error:  # a triggerer may lack its client or its connection
            log.warning("%s", unreported(error))
        else:
            report_backlog(store, dag_id, queues, depth, at=at, by=by)
    return depth


def count_runs(dag_id: str) -> Runs:
    """Counts the runs of a Dag; blocks."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    count = RuntimeTaskInstance.get_dr_count
    alive = ["queued", "running"]
    # The total first: a run that is created in between then counts as open, and is not missed.
    total = count(dag_id=dag_id)
    return Runs(open=count(dag_id=dag_id, states=alive), ever=total)


def check_age(queues: WatchedQueues, bounds: Backlog, path: str) -> None:
    """Refuses bounds that cannot be reached.

    :raises OptionsError: If only the age is bounded, and the broker does not report it.
    """
    if bounds.min_messages is None and not queues.reports_oldest_age:
        kind = queues.producers[0].kind
        raise OptionsError(
            f"{path}.max_age", f"min_messages as well: {kind} reports no age", bounds.max_age
        )


async def run_in_thread(function: Callable[[], T], name: str = "broadway-backlog") -> T:
    """Calls a blocking function in a thread of its own.

    The event loop's own threads are few, all triggers share them, and a thread that waits for an
    unresponsive broker would keep the triggerer from ending.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # the thread goes on even if the trigger is cancelled
    context = contextvars.copy_context()  # the ids bound to log lines

    def run() -> None:
        try:
            done.set_result(context.run(function))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)
