"""What a run's tasks need of the process that hosts them: its ports.

In an Airflow task :mod:`airflow_broadway.adapters` fills them in.  A process without Airflow, such
as a test, may leave each as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.producer import Connections, NoConnections, ProducerEnv
from airflow_broadway.core.formats.layout import SHARED
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.child_host import ChildHost
from airflow_broadway.runs.metrics import MetricSink, NoMetrics

if TYPE_CHECKING:
    from airflow_broadway.staging.store import Store


def _nobody_knows(run_id: str) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What the host gives to a task.

    :param connections: Looks broker connections up by their ids.
    :param metrics: Where metrics are sent.
    :param is_over: Whether a run of this Dag, by its id, has ended or is unknown.  A sweep settles
        what such a run holds; by default it settles nothing.
    :param interrupts: Exceptions by which the host ends a task wherever its main thread happens to
        be, as a time-out does.
    :param child: What callbacks in child processes may ask of the host.
    :param max_shutdown: The most seconds that a task which is told to stop may take to finish what
        it is at, whatever the pipeline's ``shutdown``.
    """

    connections: Connections = field(default_factory=NoConnections)
    metrics: MetricSink = field(default_factory=NoMetrics)
    is_over: Callable[[str], bool] = _nobody_knows
    interrupts: tuple[type[BaseException], ...] = ()
    child: ChildHost | None = None
    max_shutdown: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One execution of a task, by the names that the host gives it.

    :param map_index: Which of a mapped task's instances it is, from 0; -1 if it is not mapped.
    :param try_number: From 1.
    :param cleared: Rises each time somebody clears it, and stays in retries.
    :param forks: Whether a fork of its process can ask the host, too.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    try_number: int = 1
    cleared: int = 0
    forks: bool = True

    def owner(self) -> dict[str, Any]:
        """Who holds a lease, for people and for sweeps."""
        return {
            "dag_id": self.dag_id,
            "run_id": self.run_id,
            "task_id": self.task_id,
            "map_index": self.map_index,
            "try_number": self.try_number,
        }

    @property
    def file_name(self) -> str:
        """The task's name in the staging folder; a later try finds the earlier one's files by it.

        Different tasks have different names, or one would fence the other off: no task id has a
        ``!``.
        """
        index = f"!{self.map_index}" if self.map_index >= 0 else ""
        return re.sub(r"[^A-Za-z0-9_.-]", "_", self.task_id) + index


def producer_env(
    pipeline: Pipeline,
    ports: Ports,
    *,
    generation: str = "",
    owner: Mapping[str, Any] | None = None,
    index: int | None = None,
    store: Store | None = None,
    clock: Clock | None = None,
) -> ProducerEnv:
    """What a producer of the pipeline is opened in.

    :param generation: The execution that receives; empty for a custodian, whose leases name theirs.
    :param index: Which of the producers it is, from 0; ``None``: the only one of its run.
    :param store: The staging root, where producers keep what they note between runs.
    """
    return ProducerEnv(
        pipeline=pipeline.name,
        generation=generation,
        owner=dict(owner or {}),
        index=index or 0,
        alone=index is None,
        clock=clock or SystemClock(),
        connections=ports.connections,
        interval=pipeline.run.source.interval,
        store=store,
        staging=None if store is None else f"{store.uri.rstrip('/')}/{pipeline.name}",
        shared=None if store is None else f"{store.uri.rstrip('/')}/{SHARED}",
    )
