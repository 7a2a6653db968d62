"""The ports of a run's tasks: the services of the process that hosts them.

In an Airflow task :mod:`airflow_broadway.adapters` provides them.  A process without Airflow, such
as a test, may use the defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_broadway.core.clock import Clock, SystemClock
from airflow_broadway.core.custody.producer import ProducerEnv
from airflow_broadway.core.custody.protocol import Lease
from airflow_broadway.core.formats.layout import SHARED
from airflow_broadway.core.model.connections import Connections, NoConnections
from airflow_broadway.core.pipeline import Pipeline
from airflow_broadway.core.stages.child_host import ChildHost
from airflow_broadway.runs.metrics import MetricSink

if TYPE_CHECKING:
    from airflow_broadway.staging.run_folder import GenerationRecord, StagedRun
    from airflow_broadway.staging.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The services of the host for a task.

    :param connections: Resolves broker connections by their ids.
    :param metrics: The metrics backend.
    :param is_over: Returns whether a run of this Dag, by its id, has ended or is unknown.  A sweep
        settles the messages of such runs; by default there are none.
    :param interrupts: Exceptions that the host raises anywhere in the main thread to end a task,
        such as a time-out.
    :param child: The host's services for callbacks in child processes.
    :param max_shutdown: Upper bound in seconds on the pipeline's ``shutdown``.
    """

    connections: Connections = field(default_factory=NoConnections)
    metrics: MetricSink = field(default_factory=MetricSink)
    is_over: Callable[[str], bool] = lambda run_id: False
    interrupts: tuple[type[BaseException], ...] = ()
    child: ChildHost | None = None
    max_shutdown: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One execution of a task, as identified by the host.

    :param map_index: Index of the mapped task instance, from 0; -1 if the task is not mapped.
    :param try_number: The try number, from 1.
    :param cleared: Number of times that it was cleared; unchanged by retries.
    :param forks: Whether a fork of its process can also call the host.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    try_number: int = 1
    cleared: int = 0
    forks: bool = True

    def owner(self) -> dict[str, Any]:
        """Returns the owner of a lease, for display and for sweeps."""
        names = ("dag_id", "run_id", "task_id", "map_index", "try_number")
        return {name: getattr(self, name) for name in names}

    @property
    def file_name(self) -> str:
        """The task's name in the staging folder, equal for all its tries.

        Different tasks have different names, since one would otherwise fence off the other: no task
        id contains a ``!``.
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
    """Builds the environment in which a producer of the pipeline is opened.

    :param generation: The execution that receives; empty for a custodian, whose leases name it.
    :param index: Index of the producer, from 0; ``None`` if it is the only one of its run.
    :param store: The staging root, where producers keep state between runs.
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


def open_generation(run: StagedRun, pipeline: Pipeline, lease: Lease) -> GenerationRecord:
    """Records durably, before the first receive, that the owner of a lease is about to receive.

    :raises StagingError: As :meth:`airflow_broadway.staging.run_folder.StagedRun.open_generation`.
    """
    owner = lease.owner
    return run.open_generation(
        lease=lease,
        task_id=owner["task_id"],
        map_index=owner["map_index"],
        try_number=owner["try_number"],
        source=pipeline.run.source.to_json(),
    )
