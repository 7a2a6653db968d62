"""A backlog, asked for by Airflow's means: its connections, its settings, the runs of a Dag."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from airflow_broadway.adapters.connections import AirflowConnections
from airflow_broadway.adapters.staging import open_store, staging_root
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import QueueDepth
from airflow_broadway.core.errors import OptionsError
from airflow_broadway.core.formats.layout import SHARED
from airflow_broadway.core.model.backlog import Backlog
from airflow_broadway.runs.backlog.crossings import Runs
from airflow_broadway.runs.backlog.queues import WatchedQueues
from airflow_broadway.runs.backlog.reports import report_backlog, unreported

log = logging.getLogger(__name__)

T = TypeVar("T")


def look_at(
    queues: WatchedQueues, staging: str | None, *, dag_id: str | None = None, by: str = ""
) -> QueueDepth | None:
    """Read the depth of the queues; blocks, and connects anew.

    :param staging: URI of the staging root, where producers keep notes between runs.
    :param dag_id: The Dag of the pipeline, to which the depth is reported; ``None``: to none.
    :param by: The trigger or sensor that asks.
    :raises BroadwayError: If a connection is missing, or a broker cannot be asked.
    """
    root = staging_root(staging).rstrip("/")
    env = ProducerEnv(
        pipeline=queues.pipeline,
        generation="",
        connections=AirflowConnections(),
        staging=f"{root}/{queues.pipeline}",
        shared=f"{root}/{SHARED}",
    )
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


def runs_of(dag_id: str) -> Runs:
    """The runs of a Dag; blocks."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    count = RuntimeTaskInstance.get_dr_count
    alive = ["queued", "running"]
    # All of them first: one that is made in between then counts as open, and not as none.
    ever = count(dag_id=dag_id)
    return Runs(open=count(dag_id=dag_id, states=alive), ever=ever)


def check_age(queues: WatchedQueues, bounds: Backlog, path: str) -> None:
    """Refuse bounds that nothing would ever reach.

    :raises OptionsError: If only the age counts, and the broker never tells it.
    """
    if bounds.min_messages is None and not queues.tells_age:
        kind = queues.producers[0].kind
        raise OptionsError(
            f"{path}.max_age", f"min_messages beside it: {kind} tells no age", bounds.max_age
        )


async def off_the_loop(function: Callable[[], T]) -> T:
    """Call what blocks in a thread of its own.

    Not in the loop's own threads: they are few, all triggers share them, and one that waits for a
    silent broker would keep the triggerer from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()  # what log lines are bound to

    def settle(call: Callable[[Any], None], value: Any) -> None:
        if not done.done():  # the trigger may have been cancelled meanwhile
            call(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, context.run(function))
        except BaseException as error:
            outcome = (done.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="broadway-backlog", daemon=True).start()
    return await done
